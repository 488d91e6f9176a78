"""Scores a rollout: runs all rewards concurrently, validates their answers, and returns the weighted sum.

B rows; row ``p * G + g`` is completion ``g`` of prompt ``p``. With weights 1 and 0.5, a row scored ``(1.0, None)``
totals 1.0, ``(1.0, 0.4)`` totals 1.2, and ``(None, None)`` is an error: nothing can be learned from it.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import RewardSpec, check_rewards
from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.batches import Problem, Table, build_table, describe_row, split_rows
from tpu_grpo.rewards.executors import Executor, ThreadExecutor, WorkerPool
from tpu_grpo.rewards.loading import LoadedReward, load_reward, workers_of
from tpu_grpo.rewards.worker import WorkerJob
from tpu_grpo.types import Figure, Rollout, Scores

LOG = logging.getLogger("tpu_grpo.rewards")


def open_rewards(specs: Sequence[RewardSpec], columns: Collection[str]) -> "RewardSet":
    """Load every reward of the config for data with these columns. Processes start when they are first needed.

    Raises:
        RewardError: for a reward that cannot be loaded, two that have the same name in the metrics, or a gate that is
            not there.
    """
    try:
        check_rewards(specs)
    except ValueError as error:
        raise RewardError(str(error)) from None
    loaded = [load_reward(spec, columns) for spec in specs]
    return RewardSet(
        tuple(OpenReward(s, reward, executor_of(s, reward)) for s, reward in zip(specs, loaded, strict=True))
    )


def executor_of(spec: RewardSpec, loaded: LoadedReward) -> Executor:
    """Make the executor that runs a reward where the config says."""
    if count := workers_of(spec):
        return WorkerPool(WorkerJob(loaded.call, int(spec.memory_gb * 2**30)), count, spec.recycle)
    return ThreadExecutor(loaded.call, loaded.target)


@dataclass(frozen=True)
class OpenReward:
    """An OpenReward joins what the config says of a reward, how it is called, and where it runs."""

    spec: RewardSpec
    loaded: LoadedReward
    executor: Executor


@dataclass(frozen=True)
class RewardSet:
    """A RewardSet holds the rewards of a run; close it, or use it in a ``with`` block."""

    rewards: tuple[OpenReward, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the rewards in the metrics, in the order of the config."""
        return tuple(reward.spec.shown for reward in self.rewards)

    def for_columns(self, columns: Collection[str]) -> "RewardSet":
        """Fit the same rewards in the same processes to data with other columns; raises like open_rewards."""
        fitted = [load_reward(reward.spec, columns) for reward in self.rewards]
        return RewardSet(
            tuple(OpenReward(r.spec, loaded, r.executor) for r, loaded in zip(self.rewards, fitted, strict=True))
        )

    def repeatable_values(self, rollout: Rollout, names: Collection[str]) -> dict[str, list[float] | None]:
        """Return what some of the rewards give for all rows, NaN where they do not apply; None for one with problems.

        Timeouts and memory errors are not a property of the text, so such a reward gives None. It raises as ``score``.
        """
        if not names:
            return {}
        chosen = self._with_gates(names)
        return {
            name: None if result.timeouts + result.errors else result.values.tolist()
            for name, result in chosen._ask_all(chosen._table(rollout)).items()
            if name in names
        }

    def _with_gates(self, names: Collection[str]) -> "RewardSet":
        """Select these rewards, and those that decide which rows they are asked about."""
        gates, wanted = {r.spec.shown: r.spec.only_if for r in self.rewards}, set(names)
        while missing := {gate for name in wanted if (gate := gates[name]) is not None} - wanted:
            wanted |= missing
        return RewardSet(tuple(reward for reward in self.rewards if reward.spec.shown in wanted))

    def score(self, rollout: Rollout) -> Scores:
        """Ask each reward about all B rows; total = sum of weight * value over the rewards that apply.

        Raises:
            RewardError: for a row that no reward applies to; and, where its ``on_error`` is stop, for a reward that
                raises, is late, dies, or returns anything but one finite number or None per row. The message names the
                reward and the row.
        """
        started = time.perf_counter()
        table = self._table(rollout)
        results = self._ask_all(table)
        weights = [reward.spec.weight_at(table.step) for reward in self.rewards]
        total_B = _weighted_sum(results, weights, table)
        return Scores(
            total=total_B,
            by_name={name: result.values for name, result in results.items()},
            seconds=time.perf_counter() - started,
            figures={k: f for (name, r) in results.items() for k, f in r.figures(name).items()}
            | self._scheduled_weights(table.step),
        )

    def close(self) -> None:
        """Let the rewards close and end their processes."""
        for reward in self.rewards:
            reward.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _table(self, rollout: Rollout) -> Table:
        loaded = [reward.loaded for reward in self.rewards]
        names = {name for reward in loaded for name in reward.arguments}
        return build_table(rollout, names, token_ids=any(reward.needs_token_ids for reward in loaded))

    def _ask_all(self, table: Table) -> dict[str, "RewardResult"]:
        """Ask each on a thread of its own, which waits for the reward's gate first; gates cannot form a cycle."""
        futures: dict[str, Future[RewardResult]] = {name: Future() for name in self.names}

        def ask_one(reward: OpenReward) -> None:
            future = futures[reward.spec.shown]
            try:
                gate_B = None if reward.spec.only_if is None else futures[reward.spec.only_if].result().values
                future.set_result(ask_reward(reward, table, gate_B))
            except BaseException as error:  # raised again where the result is awaited
                future.set_exception(error)

        with ThreadPoolExecutor(max(1, len(self.rewards)), thread_name_prefix="rewards") as threads:
            for reward in self.rewards:
                threads.submit(ask_one, reward)
        return {name: future.result() for name, future in futures.items()}

    def _scheduled_weights(self, step: int) -> dict[str, Figure]:
        """Return the weights that follow a schedule, as figures."""
        scheduled = [r.spec for r in self.rewards if isinstance(r.spec.weight, dict)]
        return {f"rewards/{s.shown}/weight": Figure(s.weight_at(step), "max") for s in scheduled}


# --- one reward ------------------------------------------------------------------------------------------------------


@dataclass
class RewardResult:
    """A RewardResult holds what one reward gave for the B rows of a step."""

    values: Float[np.ndarray, " B"]
    """Values are float64, and NaN where the reward does not apply."""
    skipped: Bool[np.ndarray, " B"]
    """These rows go without the reward because of a problem."""
    seconds: float = 0.0
    timeouts: int = 0
    """It counts the rows without an answer in time."""
    errors: int = 0
    """It counts the rows with any other problem."""
    logged: dict[str, list[float]] = field(default_factory=dict)

    def figures(self, name: str) -> dict[str, Figure]:
        """Return the values for the metrics, by full name."""
        return {
            f"rewards/{name}/seconds": Figure(self.seconds, "max"),
            f"rewards/{name}/timeouts": Figure(self.timeouts, "sum"),
            f"rewards/{name}/errors": Figure(self.errors, "sum"),
            **{f"rewards/{name}/{k}": Figure(float(np.mean(v)), "mean", len(v)) for k, v in self.logged.items()},
        }


class RemoteError(Exception):
    """A RemoteError holds what a reward raised, as the text of its traceback."""


def ask_reward(reward: OpenReward, table: Table, gate_B: Float[np.ndarray, " B"] | None) -> RewardResult:
    """Return one reward's values for all rows.

    A row that the gate scored 0 or less gets 0, one the gate does not apply to gets NaN; neither is asked about.

    Raises:
        RewardError: for a problem, if ``on_error`` is stop.
    """
    started = time.perf_counter()
    spec, loaded = reward.spec, reward.loaded
    rows = range(table.size) if gate_B is None else [int(row) for row in np.flatnonzero(gate_B > 0)]
    result = RewardResult(np.full(table.size, np.nan), np.zeros(table.size, dtype=bool))
    if gate_B is not None:
        result.values[gate_B <= 0] = 0.0
    row_lists = split_rows(rows, table.group_size, workers_of(spec), loaded.call)
    answers = reward.executor.run([table.batch(loaded.batch_columns, batch) for batch in row_lists], spec.timeout)
    for batch, answer in zip(row_lists, answers, strict=True):
        result.values[batch] = answer.values
        for name, values in answer.logged.items():
            result.logged.setdefault(name, []).extend(values)
        for problem in answer.problems:
            _apply_on_error(spec, problem, batch, table, result)
    result.seconds = time.perf_counter() - started
    return result


def _apply_on_error(
    spec: RewardSpec, problem: Problem, batch: Sequence[int], table: Table, result: RewardResult
) -> None:
    rows = list(batch) if problem.row is None else [batch[problem.row]]
    message = _describe(spec, problem, batch, rows, table)
    if spec.on_error == "stop":
        raise RewardError(message) from (RemoteError(problem.trace) if problem.trace else None)
    if result.timeouts + result.errors == 0:  # the metrics count the rest
        LOG.warning("step %d: %s", table.step, message)
    if problem.kind == "late":
        result.timeouts += len(rows)
    else:
        result.errors += len(rows)
    result.values[rows] = np.nan if spec.on_error == "skip" else spec.error_value
    result.skipped[rows] = spec.on_error == "skip"


def _describe(spec: RewardSpec, problem: Problem, batch: Sequence[int], rows: Sequence[int], table: Table) -> str:
    """Say what happened where, and what to do about it."""
    what = f"reward {spec.shown} {problem.text}"
    where = describe_row(rows[0], table) if len(rows) == 1 else f"{len(rows)} rows from {rows[0]} to {rows[-1]}"
    match problem.kind:
        case "late":
            return f"{what} within its timeout of {spec.timeout:g} s, for {where}; make it faster, or raise timeout"
        case "died":
            return f"{what}, for {where}; a reward must not end its process, nor want more memory than there is"
        case "raised" if problem.failing_row is not None:
            failing = describe_row(batch[problem.failing_row], table)
            return f"{what}; {failing} raises on its own. Return None for rows the reward does not apply to"
        case "raised" if problem.row is None:
            return f"{what}; no row raises on its own, so it takes several together"
        case "raised":
            return f"{what}; for {where}. Return None for rows the reward does not apply to"
    return what if problem.row is None else f"{what} for {where}"


# --- all rewards -----------------------------------------------------------------------------------------------------


def _weighted_sum(
    results: Mapping[str, RewardResult], weights: Sequence[float], table: Table
) -> Float[np.ndarray, " B"]:
    total_B = np.zeros(table.size)
    applies_B = np.zeros(table.size, dtype=bool)
    skipped_B = np.zeros(table.size, dtype=bool)
    for result, weight in zip(results.values(), weights, strict=True):  # in order: the same bits on every host
        total_B += np.where(np.isnan(result.values), 0.0, weight * result.values)
        applies_B |= ~np.isnan(result.values)
        skipped_B |= result.skipped
    if not (applies_B | skipped_B).all():
        row = int(np.argmin(applies_B | skipped_B))
        raise RewardError(
            f"every row needs at least one reward that applies, got None from all of {', '.join(results)} for "
            f"{describe_row(row, table)}; drop the record or add a reward that scores it"
        )
    return total_B if applies_B.all() else _fill_with_group_mean(~applies_B, total_B, table.group_size)


def _fill_with_group_mean(
    lacking_B: Bool[np.ndarray, " B"], total_B: Float[np.ndarray, " B"], group_size: int
) -> Float[np.ndarray, " B"]:
    """Give rows without a reward the mean of their group's others, so that they teach nothing.

    If no row of the group has a reward, they get 0.
    """
    lacking_PG, total_PG = lacking_B.reshape(-1, group_size), total_B.reshape(-1, group_size)
    known_P = np.maximum(1, (~lacking_PG).sum(axis=1))
    mean_P = np.where(lacking_PG, 0.0, total_PG).sum(axis=1) / known_P
    return np.where(lacking_PG, mean_P[:, None], total_PG).reshape(-1)
