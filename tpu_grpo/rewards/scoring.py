"""Scores a rollout: calls all rewards concurrently, and sums their values with their weights.

Suffix B: rows; row ``p * G + g`` is completion ``g`` of prompt ``p``.

    weights         1      0.5    0
    a group of 3    1.0    None   7.0     total 1.0
                    1.0    4.0    None    total 3.0
                    None   None   7.0     total nan: the row is unscored

A reward of weight 0 is only logged: a row to which only such rewards apply is unscored, unless all weights are 0. An
unscored row has the advantage 0, and no part in means and standard deviations of rewards. Per-token rewards are not
part of the total, because the learner adds them to the tokens' advantages:

    lengths         [3           2      ]      the tokens of two completions, the stop token included
    weight 2        [[0 0.5 -1]  None   ]
    weight 1        [[1 0   0 ]  [0 0.2]]
    per_token       [[1 1 -2  ]  [0 0.2]]      the weighted sum, 0 where a reward does not apply
    by_name         -0.5, nan and 1, 0.2       the sum over each completion's tokens, before weighting

    scores = rewards.score(rollout)               # a finished rollout

    with rewards.begin(batch) as scoring:         # a rollout that is scored while it is sampled
        rollout = sampler.rollout(batch, scoring.add)
        [scores] = scoring.finish([rollout])
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from tpu_grpo.config import RewardSpec, check_rewards
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Completion, Figure, PromptBatch, Rollout, Scores
from tpu_grpo.rewards.reward_call import Call, TokenValues
from tpu_grpo.rewards.reward_functions import load_reward, target_of, workers_of
from tpu_grpo.rewards.reward_runner import (
    OpenReward,
    RewardResult,
    RewardRunner,
    RewardThread,
    score_table,
)
from tpu_grpo.rewards.reward_table import Table, build_table

LOG = logging.getLogger("tpu_grpo.rewards")
UNSCORED = "rewards/unscored"
"""The metric that counts the rows to which no reward with a weight other than 0 applies."""


def open_rewards(specs: Sequence[RewardSpec], columns: Collection[str], max_steps: int = 0) -> "RewardSet":
    """Load every reward of the config, for data with these columns and a run of this many steps.

    Worker processes start at the first call, so that a run can use rewards that were opened for a check:
    `RewardSet.for_columns` adapts them to the run's data. Raises RewardError for a reward that cannot be loaded, for
    two rewards of the same name in the metrics, or for an ``only_if`` that names no reward.
    """
    try:
        check_rewards(specs)
    except ValueError as error:
        raise RewardError(str(error)) from None
    return RewardSet(tuple(_open(spec, columns, max_steps) for spec in specs))


def _open(spec: RewardSpec, columns: Collection[str], max_steps: int) -> OpenReward:
    call = load_reward(spec, columns, max_steps)
    if count := workers_of(spec):
        from tpu_grpo.rewards.reward_processes import RewardProcesses  # most rewards need no processes

        return OpenReward(spec, call, RewardProcesses(call, int(spec.memory_gb * 2**30), count, spec.recycle))
    return OpenReward(spec, call, RewardThread(call, target_of(spec)))


@dataclass(frozen=True)
class RewardSet:
    """The rewards of a run; close it, or use it in a ``with`` block."""

    rewards: tuple[OpenReward, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the rewards in the metrics, in the order of the config."""
        return tuple(reward.spec.shown for reward in self.rewards)

    @property
    def calls(self) -> list[Call]:
        """Return how each reward is called."""
        return [reward.call for reward in self.rewards]

    @property
    def token_rewards(self) -> tuple[str, ...]:
        """Return the names of the rewards that return a number per token."""
        return tuple(reward.spec.shown for reward in self.rewards if reward.call.per_token)

    @property
    def of_environments(self) -> tuple[str, ...]:
        """Return the names of the rewards that take ``environments`` or ``environment_rewards``."""
        asked = {"environments", "environment_rewards"}
        return tuple(reward.spec.shown for reward in self.rewards if asked & {*reward.call.extras})

    @property
    def keeps_environments(self) -> bool:
        """Whether a reward takes ``environments``, so that their state after the conversation must be kept."""
        return any("environments" in reward.call.extras for reward in self.rewards)

    def for_columns(self, columns: Collection[str]) -> "RewardSet":
        """Return these rewards, in the same processes, for data with other columns. Raises what open_rewards raises."""
        return RewardSet(tuple(replace(r, call=load_reward(r.spec, columns, r.call.max_steps)) for r in self.rewards))

    def repeatable_values(self, rollout: Rollout, names: Collection[str]) -> dict[str, list[Any] | None]:
        """Call the rewards ``names``, and those that their ``only_if`` needs; return the values of ``names`` for all
        rows, for comparison between hosts.
        A value is NaN where the reward does not apply, and a text for a per-token reward (`RewardResult.comparable`).
        The values of a reward that had a problem are None, because a timeout may occur on one host only. Raises the
        errors of ``score``.
        """
        if not names:
            return {}
        only_if, called = {reward.spec.shown: reward.spec.only_if for reward in self.rewards}, set(names)
        for name in names:
            while (name := only_if[name]) is not None:  # which may need another one; `check_rewards` refuses circles
                called.add(name)
        chosen = RewardSet(tuple(reward for reward in self.rewards if reward.spec.shown in called))
        return {
            name: None if result.timeouts + result.errors else result.comparable
            for name, result in chosen._ask_all(build_table(rollout, chosen.calls), {}).items()
            if name in names
        }

    def score(self, rollout: Rollout) -> Scores:
        """Call each reward for all B rows; total = sum of weight * value over the rewards that apply.

        Raises RewardError for a reward with ``on_error: stop`` that raises, is late, dies, or does not return one
        finite number or None per row. The message names the reward and the row.
        """
        started, table = time.perf_counter(), build_table(rollout, self.calls)
        return add_up(self, self._ask_all(table, {}), table, started)

    def begin(self, batch: PromptBatch, rollouts: int = 1) -> "Scoring":
        """Begin to score rollouts of a batch's prompts, before they are sampled; use it in a ``with`` block."""
        return Scoring(self, batch, rollouts)

    def close(self) -> None:
        """Close the rewards, and end their worker processes and threads."""
        for reward in self.rewards:
            reward.workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask_all(self, table: Table, early: Mapping[str, Callable[[], RewardResult]]) -> dict[str, RewardResult]:
        """Return the results of all rewards: that of ``early[name]()`` if it exists, otherwise that of a call. Each
        reward has a thread, which first waits for its gate (the reward in ``only_if``); gates cannot form a cycle."""
        futures: dict[str, Future[RewardResult]] = {name: Future() for name in self.names}

        def ask_one(reward: OpenReward) -> None:
            name, gate = reward.spec.shown, reward.spec.only_if
            future = futures[name]
            try:
                gate_B = None if gate is None else futures[gate].result().values
                future.set_result(early[name]() if name in early else score_table(reward, table, gate_B))
            except BaseException as error:  # raised again where the result is awaited
                future.set_exception(error)

        with ThreadPoolExecutor(max(1, len(self.rewards)), thread_name_prefix="rewards") as threads:
            for reward in self.rewards:
                threads.submit(ask_one, reward)
        return {name: future.result() for name, future in futures.items()}


class Scoring:
    """Scores rollouts of the same prompts; each group can be added as soon as it is sampled.

    All methods are called on one thread. The rewards with ``may_start_early`` begin to score a group when it is added,
    the others in ``finish``. A reward with a gate (the reward in its ``only_if``) starts early only if the gate does.
    """

    def __init__(self, rewards: RewardSet, batch: PromptBatch, rollouts: int):
        self._rewards = rewards
        self._batch = batch
        chosen = {reward.spec.shown: reward for reward in rewards.rewards if reward.may_start_early}
        while late := [n for n, r in chosen.items() if r.spec.only_if is not None and r.spec.only_if not in chosen]:
            for name in late:
                del chosen[name]
        self.early = {name: RewardRunner(r, rollouts * len(batch.prompts), rollouts) for name, r in chosen.items()}
        """The runner of each reward that starts early, by the reward's name."""
        self._known: set[tuple[int, int]] = set()
        self._threads = ThreadPoolExecutor(max(1, len(self.early)), thread_name_prefix="early rewards")
        self._first: list[RewardRunner] = []
        for runner in self.early.values():
            gate = runner.reward.spec.only_if
            (self._first if gate is None else self.early[gate].followers).append(runner)
        for runner in self.early.values():
            runner.start(self._threads)

    def add(self, prompt: int, completions: Sequence[Completion], texts: Sequence[str], rollout: int = 0) -> None:
        """Queue a prompt's group for the rewards that start early; a group that was added before is ignored.
        ``prompt`` is the prompt's number in the batch.

        Raises RewardError for a row that lacks a column, or if a reward with ``on_error: stop`` had a problem with an
        earlier group.
        """
        for runner in self.early.values():
            runner.check()
        if not self.early or (rollout, prompt) in self._known:
            return
        self._known.add((rollout, prompt))
        batch, size = PromptBatch(self._batch.step, (self._batch.prompts[prompt],)), len(texts)
        table = build_table(
            Rollout(batch, size, tuple(completions), tuple(texts), seconds=0.0),
            [runner.reward.call for runner in self.early.values()],
            numbers=range(prompt * size, (prompt + 1) * size),
        )
        for runner in self._first:
            runner.add((rollout, prompt), table)

    def finish(self, rollouts: Sequence[Rollout], prompts: Sequence[int] | None = None) -> list[Scores]:
        """Return each rollout's scores, for all prompts or for ``prompts``. Raises the errors of ``RewardSet.score``.

        The scores' ``seconds`` do not include the time before this call.
        """
        started = time.perf_counter()
        own = range(len(self._batch.prompts)) if prompts is None else prompts
        for number, rollout in enumerate(rollouts):
            for prompt in own:
                rows = slice(prompt * rollout.group_size, (prompt + 1) * rollout.group_size)
                self.add(prompt, rollout.completions[rows], rollout.texts[rows], number)  # ignored if it was added
        for runner in self._first:
            runner.end()
        found = []
        for number, rollout in enumerate(rollouts):
            table = build_table(rollout.select(own), self._rewards.calls, numbers=rollout.rows_of(own))
            early = {name: partial(runner.result, number, own) for name, runner in self.early.items()}
            found.append(add_up(self._rewards, self._rewards._ask_all(table, early), table, started))
            started = time.perf_counter()
        return found

    def close(self) -> None:
        """Cancel the scoring of groups that are not scored yet, and end the threads."""
        for runner in self.early.values():
            runner.cancel()
        self._threads.shutdown()
        self.early = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# --- the total -------------------------------------------------------------------------------------------------------


def add_up(rewards: RewardSet, results: Mapping[str, RewardResult], table: Table, started: float) -> Scores:
    """Sum the rewards' values with their weights; unscored rows get NaN.

    A row whose environment failed gets ``Failure.reward`` as the value of each completion reward and as its total; if
    ``Failure.reward`` is None, the row is unscored. A warning names the first row to which no reward applies, apart
    from rows that had a problem.
    """
    total_B = np.zeros(table.size)
    scored_B, any_B, skipped_B = (np.zeros(table.size, dtype=bool) for _ in range(3))
    weights = {reward.spec.shown: reward.spec.weight_at(table.step) for reward in rewards.rewards}
    token_rewards, per_token = rewards.token_rewards, list[TokenValues]()
    if token_rewards:
        per_token = [np.zeros(len(ids)) for ids in table.columns["completion_ids"]]
    rewarded = {name: weights[name] != 0.0 or not any(weights.values()) for name in results}
    for name, result in results.items():  # in a fixed order: the same bits on every host
        skipped_B |= result.skipped
        if name in token_rewards:
            any_B |= ~np.isnan(result.values) & rewarded[name]
            for row, values_T in enumerate(result.of_tokens):
                if len(values_T):
                    per_token[row] += weights[name] * values_T
            continue
        for row, failure in table.failures.items():
            result.values[row] = np.nan if failure.reward is None else failure.reward
        applies_B = ~np.isnan(result.values)
        any_B |= applies_B & rewarded[name]
        total_B += np.where(applies_B, weights[name] * result.values, 0.0)
        scored_B |= applies_B & rewarded[name]
    if not any(rewarded[name] for name in set(results) - set(token_rewards)):
        scored_B[:] = True  # only per-token rewards have a weight, or there are none: all totals are 0
    any_B |= not results
    for row, failure in table.failures.items():
        total_B[row], scored_B[row] = failure.reward or 0.0, failure.reward is not None
    if rows := np.flatnonzero(~any_B & ~skipped_B).tolist():
        others = f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""
        lacking = f"no reward of {', '.join(results)} applies to {table.shown(rows[0])}{others}"
        LOG.warning("step %d: %s; such a row counts in no mean, and has the advantage 0", table.step, lacking)
    scheduled = [reward.spec.shown for reward in rewards.rewards if isinstance(reward.spec.weight, dict)]
    return Scores(
        total=np.where(scored_B, total_B, np.nan),
        by_name={name: result.values for name, result in results.items()},
        seconds=time.perf_counter() - started,
        figures={k: figure for name, result in results.items() for k, figure in result.figures(name).items()}
        | {f"rewards/{name}/weight": Figure(weights[name], "max") for name in scheduled}
        | {UNSCORED: Figure(int((~any_B).sum()), "sum")},
        per_token=tuple(per_token),
        token_rewards=token_rewards,
    )


def check_some_scored(rollout: Rollout, scores: Scores) -> None:
    """Raise RewardError if no reward with a weight other than 0 applies to any row of a rollout, unless a reward had a
    problem or an environment failed."""
    rows = len(rollout.texts)
    problems = sum(f.value for n, f in scores.figures.items() if n.endswith(("/errors", "/timeouts")))
    failed = any(c.episode is not None and c.episode.failure is not None for c in rollout.completions)
    if scores.figures[UNSCORED].value < rows or problems or failed:
        return
    raise RewardError(
        f"some row of a step needs a reward that applies, got None from all of {', '.join(scores.by_name)} for all "
        f"{rows} rows of step {rollout.batch.step}, the first for the prompt {rollout.batch.prompts[0].text[:120]!r} "
        f"with the completion {rollout.texts[0][:120]!r}; drop such records from the data, or add a reward that scores "
        "them"
    )
