"""Scores a rollout: runs all rewards concurrently, validates their answers, and returns the weighted sum.

B rows; row ``p * G + g`` is completion ``g`` of prompt ``p``. With weights 1 and 0.5, a row scored ``(1.0, None)``
totals 1.0, ``(1.0, 0.4)`` totals 1.2, and ``(None, None)`` takes the mean of its group; see totals.py. Rewards of
single tokens have no part in the total; see tokens.py.

    scores = rewards.score(rollout)               # a rollout that is there

    with rewards.begin(batch) as scoring:         # one that is only now sampled
        rollout = sampler.rollout(batch, scoring.add)
        [scores] = scoring.finish([rollout])
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from tpu_grpo.config import RewardSpec, check_rewards
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Completion, Figure, PromptBatch, Rollout, Scores
from tpu_grpo.rewards.asking import OpenReward, RewardResult, ask_reward
from tpu_grpo.rewards.batches import Table, build_table
from tpu_grpo.rewards.early import EarlyGroups
from tpu_grpo.rewards.executors import Executor, ThreadExecutor, WorkerPool
from tpu_grpo.rewards.loading import LoadedReward, load_reward, workers_of
from tpu_grpo.rewards.tokens import TokenValues, weighted_tokens
from tpu_grpo.rewards.totals import UNSCORED, add_up
from tpu_grpo.rewards.worker import WorkerJob

EarlyResults = Mapping[str, Callable[[], RewardResult]]
"""Waits for the result of a reward that was asked early, by its name."""


def open_rewards(specs: Sequence[RewardSpec], columns: Collection[str], max_steps: int = 0) -> "RewardSet":
    """Load every reward of the config for data with these columns, and for a run of so many steps.

    Processes start when they are first needed.

    Raises:
        RewardError: for a reward that cannot be loaded, two that have the same name in the metrics, or a gate that is
            not there.
    """
    try:
        check_rewards(specs)
    except ValueError as error:
        raise RewardError(str(error)) from None
    loaded = [load_reward(spec, columns, max_steps) for spec in specs]
    return RewardSet(
        tuple(OpenReward(s, reward, executor_of(s, reward)) for s, reward in zip(specs, loaded, strict=True))
    )


def executor_of(spec: RewardSpec, loaded: LoadedReward) -> Executor:
    """Make the executor that runs a reward where the config says."""
    if count := workers_of(spec):
        return WorkerPool(WorkerJob(loaded.call, int(spec.memory_gb * 2**30)), count, spec.recycle)
    return ThreadExecutor(loaded.call, loaded.target)


@dataclass(frozen=True)
class RewardSet:
    """A RewardSet holds the rewards of a run; close it, or use it in a ``with`` block."""

    rewards: tuple[OpenReward, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the rewards in the metrics, in the order of the config."""
        return tuple(reward.spec.shown for reward in self.rewards)

    @property
    def token_rewards(self) -> tuple[str, ...]:
        """Return the names of those that give a number per token."""
        return tuple(reward.spec.shown for reward in self.rewards if reward.loaded.call.per_token)

    @property
    def of_environments(self) -> tuple[str, ...]:
        """Return the names of those that ask for environments, or for what these gave."""
        asked = {"environments", "environment_rewards"}
        return tuple(reward.spec.shown for reward in self.rewards if asked & {*reward.loaded.call.extras})

    @property
    def keeps_environments(self) -> bool:
        """Return whether one asks for environments as they were at the end."""
        return any("environments" in reward.loaded.call.extras for reward in self.rewards)

    def for_columns(self, columns: Collection[str]) -> "RewardSet":
        """Fit the same rewards in the same processes to data with other columns; raises like open_rewards."""
        fitted = [load_reward(r.spec, columns, r.loaded.call.max_steps) for r in self.rewards]
        return RewardSet(
            tuple(OpenReward(r.spec, loaded, r.executor) for r, loaded in zip(self.rewards, fitted, strict=True))
        )

    def repeatable_values(self, rollout: Rollout, names: Collection[str]) -> dict[str, list[Any] | None]:
        """Return what some of the rewards give for all rows, NaN where they do not apply; None for one with problems.

        Of a reward of single tokens it is a text per row, see ``comparable``. Timeouts and memory errors are not a
        property of the text, so such a reward gives None. It raises as ``score``.
        """
        if not names:
            return {}
        chosen = self._with_gates(names)
        return {
            name: None if result.timeouts + result.errors else result.comparable()
            for name, result in chosen._ask_all(chosen._table(rollout), {}).items()
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
            RewardError: where its ``on_error`` is stop, for a reward that raises, is late, dies, or returns anything
                but one finite number or None per row. The message names the reward and the row.
        """
        return self.score_and_explain(rollout)[0]

    def score_and_explain(
        self, rollout: Rollout, numbers: Sequence[int] | None = None
    ) -> tuple[Scores, dict[str, RewardResult]]:
        """Return the scores, and what each reward gave, with its failures; raises as ``score``.

        ``numbers`` are what failures call the rows, where the rollout is a part of another.
        """
        started, table = time.perf_counter(), self._table(rollout, numbers)
        results = self._ask_all(table, {})
        return self._scores(table, results, started), results

    def begin(self, batch: PromptBatch, rollouts: int = 1) -> "Scoring":
        """Begin to score rollouts of a batch's prompts, before they are sampled; use it in a ``with`` block."""
        return Scoring(self, batch, rollouts)

    def close(self) -> None:
        """Let the rewards close and end their processes."""
        for reward in self.rewards:
            reward.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _table(self, rollout: Rollout, numbers: Sequence[int] | None = None) -> Table:
        names = {name for reward in self.rewards for name in reward.loaded.batch_columns}
        return build_table(rollout, names, numbers=numbers)

    def _scores(self, table: Table, results: Mapping[str, RewardResult], started: float) -> Scores:
        """Put together what the rewards gave."""
        weights = [reward.spec.weight_at(table.step) for reward in self.rewards]
        totals = add_up(results, weights, table, self.token_rewards)
        return Scores(
            total=totals.total,
            by_name={name: result.values for name, result in results.items()},
            seconds=time.perf_counter() - started,
            figures={k: f for (name, r) in results.items() for k, f in r.figures(name).items()}
            | self._scheduled_weights(table.step)
            | {UNSCORED: Figure(int(totals.without.sum()), "sum")},
            per_token=self._per_token(results, weights, table),
            token_rewards=self.token_rewards,
            unscored=totals.unscored,
        )

    def _per_token(
        self, results: Mapping[str, RewardResult], weights: Sequence[float], table: Table
    ) -> tuple[TokenValues, ...]:
        """Add up the rewards of single tokens; there is nothing if none of the rewards is one."""
        if not self.token_rewards:
            return ()
        given = [
            (weight, result.of_tokens)
            for result, weight in zip(results.values(), weights, strict=True)
            if result.of_tokens
        ]
        return weighted_tokens(given, [len(ids) for ids in table.columns["completion_ids"]])

    def _ask_all(self, table: Table, early: EarlyResults) -> dict[str, RewardResult]:
        """Return the early results, and ask the other rewards, each on a thread of its own.

        It waits for the reward's gate first; gates cannot form a cycle.
        """
        futures: dict[str, Future[RewardResult]] = {name: Future() for name in self.names}

        def ask_one(reward: OpenReward) -> None:
            name, gate = reward.spec.shown, reward.spec.only_if
            future = futures[name]
            try:
                gate_B = None if gate is None else futures[gate].result().values
                future.set_result(early[name]() if name in early else ask_reward(reward, table, gate_B))
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


class Scoring:
    """A Scoring scores rollouts whose groups it may be told of before the rollouts are there."""

    def __init__(self, rewards: RewardSet, batch: PromptBatch, rollouts: int):
        self._rewards = rewards
        self._prompts = range(len(batch.prompts))
        self._early = EarlyGroups(rewards.rewards, batch, rollouts)

    def add(self, prompt: int, completions: Sequence[Completion], texts: Sequence[str], rollout: int = 0) -> None:
        """Have the group of a prompt scored as soon as the rewards find time.

        Args:
            prompt: the number of the prompt in the batch.
            completions: all of its completions in a rollout.
            texts: what they say.
            rollout: the number of the rollout.

        Raises:
            RewardError: if a reward had a problem with an earlier group that ends the run.
        """
        self._early.add(prompt, completions, texts, rollout)

    def finish(self, rollouts: Sequence[Rollout], prompts: Sequence[int] | None = None) -> list[Scores]:
        """Return the scores of the rollouts, or of the rows of some prompts of each; raises as ``RewardSet.score``.

        The seconds are those after this call.
        """
        started, own = time.perf_counter(), self._prompts if prompts is None else prompts
        for number, rollout in enumerate(rollouts):
            for prompt in own:
                rows = slice(prompt * rollout.group_size, (prompt + 1) * rollout.group_size)
                self._early.add(prompt, rollout.completions[rows], rollout.texts[rows], number)
        self._early.end()
        found = []
        for number, rollout in enumerate(rollouts):
            table = self._rewards._table(rollout.select(own), rollout.rows_of(own))
            early = {name: partial(self._early.result, name, number, own) for name in self._early.names}
            found.append(self._rewards._scores(table, self._rewards._ask_all(table, early), started))
            started = time.perf_counter()
        return found

    def close(self) -> None:
        """Give up what is not scored yet."""
        self._early.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
