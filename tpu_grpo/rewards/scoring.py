"""From a rollout to one number per row: every reward asked side by side, its answers checked, weighted and summed.

B rows; row ``p * G + g`` is completion ``g`` of prompt ``p``. With weights 1 and 0.5, a row scored ``(1.0, None)``
totals 1.0, ``(1.0, 0.4)`` totals 1.2, and ``(None, None)`` is an error: nothing can be learned from it.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import RewardSpec, check_rewards
from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.asking import Asked, ask
from tpu_grpo.rewards.loading import LoadedReward, load_reward, workers_of
from tpu_grpo.rewards.pool import Place, Processes, Thread
from tpu_grpo.rewards.processes import Job
from tpu_grpo.rewards.tables import Table, name_row, table_of
from tpu_grpo.types import Figure, Rollout, Scores


def open_rewards(specs: Sequence[RewardSpec], columns: Collection[str]) -> "RewardSet":
    """Load every reward of the config for data with these columns. Processes start when they are first needed.

    Raises:
        RewardError: for a reward that cannot be loaded, two that would share a name in the metrics, or a gate that is
            not there.
    """
    try:
        check_rewards(specs)
    except ValueError as error:
        raise RewardError(str(error)) from None
    loaded = [load_reward(spec, columns) for spec in specs]
    return RewardSet(tuple(OpenReward(s, reward, place_of(s, reward)) for s, reward in zip(specs, loaded, strict=True)))


def place_of(spec: RewardSpec, loaded: LoadedReward) -> Place:
    """Where the config has a reward run."""
    if count := workers_of(spec):
        return Processes(Job(loaded.call, int(spec.memory_gb * 2**30)), count, spec.recycle)
    return Thread(loaded.call, loaded.target)


@dataclass(frozen=True)
class OpenReward:
    """A reward of a run: what the config says, how it is called, and where it runs."""

    spec: RewardSpec
    loaded: LoadedReward
    place: Place


@dataclass(frozen=True)
class RewardSet:
    """The rewards of a run; to be closed, or used in a ``with``."""

    rewards: tuple[OpenReward, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards in the metrics, in the order of the config."""
        return tuple(reward.spec.shown for reward in self.rewards)

    def for_columns(self, columns: Collection[str]) -> "RewardSet":
        """The same rewards in the same processes, for data with other columns; raises like open_rewards."""
        fitted = [load_reward(reward.spec, columns) for reward in self.rewards]
        return RewardSet(
            tuple(OpenReward(r.spec, loaded, r.place) for r, loaded in zip(self.rewards, fitted, strict=True))
        )

    def repeatable_values(self, rollout: Rollout, names: Collection[str]) -> dict[str, list[float] | None]:
        """What some of the rewards give for all rows, NaN where they do not apply; None for one that had problems.

        Whether a reward is late or runs out of memory is no property of the text. Raises as ``score`` does.
        """
        if not names:
            return {}
        chosen = self._with_gates(names)
        asked = chosen._results(table_of(rollout, chosen.rewards))
        return {
            name: None if result.timeouts + result.errors else result.values.tolist()
            for name, result in asked.items()
            if name in names
        }

    def _with_gates(self, names: Collection[str]) -> "RewardSet":
        """These rewards, and those that decide which rows they are asked about."""
        gates, wanted = {r.spec.shown: r.spec.only_if for r in self.rewards}, set(names)
        while missing := {gate for name in wanted if (gate := gates[name]) is not None} - wanted:
            wanted |= missing
        return RewardSet(tuple(reward for reward in self.rewards if reward.spec.shown in wanted))

    def score(self, rollout: Rollout) -> Scores:
        """Ask each reward about all B rows; total = sum of weight * value over the rewards that apply.

        Raises:
            RewardError: for a row that no reward applies to; and, where its ``on_error`` is stop, for a reward that
                raises, is late, dies, or returns anything but one finite number or None per row. Names reward and row.
        """
        started = time.perf_counter()
        table = table_of(rollout, self.rewards)
        results = self._results(table)
        weights = [reward.spec.weight_at(table.step) for reward in self.rewards]
        return Scores(
            total=_weighted_sum(results, weights, table),
            by_name={name: result.values for name, result in results.items()},
            seconds=time.perf_counter() - started,
            figures={k: f for (name, r) in results.items() for k, f in r.figures(name).items()} | self._weights(table),
        )

    def close(self) -> None:
        """Let the rewards close and end their processes."""
        for reward in self.rewards:
            reward.place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _results(self, table: Table) -> dict[str, Asked]:
        with ThreadPoolExecutor(max(1, len(self.rewards)), thread_name_prefix="rewards") as pool:
            asked = self._ask_all(pool, table)
        return {name: future.result() for name, future in asked.items()}

    def _ask_all(self, pool: ThreadPoolExecutor, table: Table) -> Mapping[str, Future[Asked]]:
        """Each on a thread of its own, which waits for the reward's gate first; there are no circles of gates."""
        futures: dict[str, Future[Asked]] = {name: Future() for name in self.names}

        def one(reward: OpenReward) -> None:
            future = futures[reward.spec.shown]
            try:
                gate = None if reward.spec.only_if is None else futures[reward.spec.only_if].result().values
                future.set_result(ask(reward.spec, reward.loaded, reward.place, table, gate))
            except BaseException as error:  # raised again where the result is awaited
                future.set_exception(error)

        for reward in self.rewards:
            pool.submit(one, reward)
        return futures

    def _weights(self, table: Table) -> dict[str, Figure]:
        """The weights that follow a schedule, at this step."""
        scheduled = [r.spec for r in self.rewards if isinstance(r.spec.weight, dict)]
        return {f"rewards/{s.shown}/weight": Figure(s.weight_at(table.step), "max") for s in scheduled}


def _weighted_sum(results: Mapping[str, Asked], weights: Sequence[float], table: Table) -> Float[np.ndarray, " B"]:
    total_B = np.zeros(table.size)
    applies_B = np.zeros(table.size, dtype=bool)
    excused_B = np.zeros(table.size, dtype=bool)
    for result, weight in zip(results.values(), weights, strict=True):  # in order: the same bits on every host
        total_B += np.where(np.isnan(result.values), 0.0, weight * result.values)
        applies_B |= ~np.isnan(result.values)
        excused_B |= result.skipped
    if not (applies_B | excused_B).all():
        raise RewardError(
            f"every row needs at least one reward that applies, got None from all of {', '.join(results)} for "
            f"{name_row(int(np.argmin(applies_B | excused_B)), table)}; drop the record or add a reward that scores it"
        )
    return total_B if applies_B.all() else _group_means_where(~applies_B, total_B, table.group_size)


def _group_means_where(
    lacking_B: Bool[np.ndarray, " B"], total_B: Float[np.ndarray, " B"], group_size: int
) -> Float[np.ndarray, " B"]:
    """Give rows without a reward the mean of their group's others, so that they teach nothing; 0 in a group of such."""
    lacking_PG, total_PG = lacking_B.reshape(-1, group_size), total_B.reshape(-1, group_size)
    known_P = np.maximum(1, (~lacking_PG).sum(axis=1))
    mean_P = np.where(lacking_PG, 0.0, total_PG).sum(axis=1) / known_P
    return np.where(lacking_PG, mean_P[:, None], total_PG).reshape(-1)
