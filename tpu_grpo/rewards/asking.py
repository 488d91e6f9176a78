"""Calls one reward for rows of a rollout, in batches through its executor; ``on_error`` says how to handle problems.

    table = build_table(rollout, rewards)                   # the columns that the rewards need, each [B]
    result = ask_reward(reward, table, gate_B)              # for all rows of a rollout at once

    groups = Groups(reward, expected=32, rollouts=1)        # or one group at a time, while other groups are sampled
    groups.start(threads)                                   # runs the executor on another thread
    groups.ask((0, 3), table_of_prompt_3)                   # queues a group's rows for the reward's workers
    groups.end()                                            # no more groups will come
    result = groups.result(0, prompts=range(32))            # waits for the unanswered rows

A reward's gate is the reward that it names in ``only_if``. When a gate has scored a group, the gate's thread queues the
group for the rewards that depend on the gate.
"""

import contextlib
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import RewardSpec
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import LARGEST_REWARD, RewardError
from tpu_grpo.records.stages import Conversation, Figure, Rollout
from tpu_grpo.rewards.executors import Executor
from tpu_grpo.rewards.feed import Feed
from tpu_grpo.rewards.protocol import OF_ROWS, TEXT_ARGUMENTS
from tpu_grpo.rewards.reward_call import NO_VALUES, SHORT_REPR, Answer, Call, Problem, RewardBatch, TokenValues
from tpu_grpo.rewards.reward_functions import workers_of
from tpu_grpo.rewards.shipped import SHIPPED
from tpu_grpo.rewards.shipped.correctness import as_read

LOG = logging.getLogger("tpu_grpo.rewards")
_BATCHES_PER_WORKER = 4
"""With several batches per worker, other workers can take the remaining ones while one worker has a slow batch."""
Group = tuple[int, int]
"""(number of the rollout, number of the prompt in it)."""


@dataclass(frozen=True)
class OpenReward:
    """A reward of the config with its call and its executor."""

    spec: RewardSpec
    call: Call
    executor: Executor

    @property
    def may_start_early(self) -> bool:
        """Whether the reward may score groups while other groups are sampled; the config's ``early`` if that is set.

        By default, functions of one row and shipped rewards may, because their value for a row does not depend on other
        rows. A reward in the main process competes with the engine for Python's interpreter lock. Therefore, in the
        main process only shipped rewards that run there by default may.
        """
        if self.spec.early is not None:
            return self.spec.early
        if self.spec.name in SHIPPED:
            return workers_of(self.spec) > 0 or SHIPPED[self.spec.name].workers == 0
        return workers_of(self.spec) > 0 and self.call.concurrency is not None


# --- the rows that a reward is called for ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A rollout's rows as columns: texts, token ids, and the columns of the data that rewards need."""

    columns: dict[str, Sequence[Any]]
    """Name -> the column's values, one per row: [B]."""
    messages: dict[str, Sequence[Conversation | str]]
    """Prompts and completions for rewards with ``messages: true``; a completion without an environment stays a text."""
    step: int
    group_size: int
    numbers: Sequence[int]
    """Each row's number in the whole rollout, for error messages."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """The rows whose environment failed, and how. No reward is called for these rows."""
    rendered: Sequence[str] = ()
    """Each row's rendered prompt."""

    @property
    def size(self) -> int:
        """Return the number of rows, B."""
        return len(self.columns["completions"])

    def batch(self, call: Call, rows: Sequence[int]) -> RewardBatch:
        """Make a batch of some rows for a reward, with texts as `Call.thinking` says; messages have no thinking."""
        columns = self.columns | self.messages if call.messages else self.columns
        found = {n: [columns[n][row] for row in rows] for n in call.batch_columns}
        if call.thinking != "kept":
            said, names = zip(found["completions"], rows, strict=True), str(dict(call.options))
            found["completions"] = [
                as_read(text, self.rendered[row], call.thinking, names) if isinstance(text, str) else text
                for text, row in said
            ]
        return RewardBatch(found, self.step, len(rows))

    def shown(self, row: int) -> str:
        """Describe a row for an error message, by its number and its shortened texts."""
        prompt, completion = (SHORT_REPR.repr(self.columns[name][row]) for name in TEXT_ARGUMENTS)
        return f"row {self.numbers[row]} (prompt {prompt}, completion {completion})"


def build_table(rollout: Rollout, rewards: Iterable[OpenReward], *, numbers: Sequence[int] | None = None) -> Table:
    """Collect the texts, data columns and extras (OF_ROWS) that the rewards are called with.

    A plain completion is passed as its text. A conversation with an environment is passed as the policy's last turn, or
    as all messages for ``messages: true``. If the rollout is part of a larger one, ``numbers`` are its rows' numbers
    there, for error messages. Raises RewardError for a row without a column or environment that a reward needs.
    """
    rows, episodes = rollout.row_prompts, [completion.episode for completion in rollout.completions]
    said = list(zip(episodes, rollout.texts, strict=True))
    columns: dict[str, Sequence[Any]] = {
        "prompts": [p.asked for p in rows],
        "completions": [text if episode is None else episode.last_words for episode, text in said],
    }
    messages: dict[str, Sequence[Any]] = {
        "prompts": [p.conversation for p in rows],
        "completions": [text if e is None else [dict(message) for message in e.messages] for e, text in said],
    }
    failures = {row: e.failure for row, e in enumerate(episodes) if e is not None and e.failure is not None}
    numbers = range(len(rows)) if numbers is None else numbers
    rendered = [p.text for p in rows]
    table = Table(columns, messages, rollout.batch.step, rollout.group_size, numbers, failures, rendered)
    for name in sorted({name for reward in rewards for name in reward.call.batch_columns} - {*TEXT_ARGUMENTS}):
        if name in OF_ROWS and not (rows and name in rows[0].columns):
            columns[name] = _extra_column(name, rollout)
            continue
        lacking = next((i for i, p in enumerate(rows) if name not in p.columns), None)
        if lacking is not None:
            raise RewardError(
                f"rewards were opened for data with the column {name!r}, which {table.shown(lacking)} lacks; "
                f"it has {sorted(rows[lacking].columns)}. Add the column to the data"
            )
        columns[name] = [p.columns[name] for p in rows]
    return table


def _extra_column(name: str, rollout: Rollout) -> list[Any]:
    """Return the values of the argument ``name``, one of OF_ROWS, for all rows."""
    if name == "completion_ids":
        return [completion.token_ids.tolist() for completion in rollout.completions]
    if name == "rendered_prompts":
        return [prompt.text for prompt in rollout.row_prompts]
    episodes = [completion.episode for completion in rollout.completions if completion.episode is not None]
    if len(episodes) < len(rollout.completions):
        raise RewardError(
            f"a reward that takes {name} needs conversations with environments, got plain completions; set "
            "environment.name, or take another reward"
        )
    return [episode.kept if name == "environments" else episode.reward for episode in episodes]


def split_rows(rows: Sequence[int], group_size: int, workers: int, call: Call) -> list[list[int]]:
    """Split rows, in ascending order, into at most `most_batches` batches.

    For a function of a batch, each batch is made of whole groups: with two workers and groups of 2, rows 0 to 7 become
    ``[[0, 1], [2, 3], [4, 5], [6, 7]]``.
    """
    group_of = (lambda row: row // group_size) if call.concurrency is None else None
    units = [list(unit) for _, unit in itertools.groupby(rows, group_of)]
    each = max(1, math.ceil(len(units) / most_batches(workers, call)))
    return [list(itertools.chain(*batch)) for batch in itertools.batched(units, each)]


def most_batches(workers: int, call: Call) -> int:
    """Return the largest number of batches for the rows of a step: four per worker, or one per worker for an async
    function, which awaits the rows of a batch together. A function of a batch with one worker gets all rows at once."""
    if workers <= 1 and call.concurrency is None:
        return 1
    return max(1, workers) * (1 if call.is_async else _BATCHES_PER_WORKER)


# --- what a reward answers -------------------------------------------------------------------------------------------


class RemoteError(Exception):
    """The cause of the RewardError for a reward that raised an exception; its message is that exception's traceback."""


@dataclass
class RewardResult:
    """The values and problems of one reward for the B rows of a table."""

    values: Float[np.ndarray, " B"]
    """float64; NaN where the reward does not apply."""
    skipped: Bool[np.ndarray, " B"]
    """True for rows that have no value because of a problem or a failed environment."""
    seconds: float = 0.0
    timeouts: int = 0
    """The number of rows that were not answered in time."""
    errors: int = 0
    """The number of rows with any other problem."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    of_tokens: list[TokenValues] = field(default_factory=list)
    """For a per-token reward, the numbers of each row's tokens; empty for any other reward."""
    failures: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    """For each problem, the numbers of its rows and the error message."""

    @property
    def comparable(self) -> list[Any]:
        """Return, for each row, what must be equal on all hosts: the value; for a per-token reward, a text with the sum
        and a digest of the row's numbers."""
        if not self.of_tokens:
            return self.values.tolist()
        return [
            f"{value!r} in all, digest of the tokens' {hashlib.sha256(values_T.tobytes()).hexdigest()[:12]}"
            for value, values_T in zip(self.values.tolist(), self.of_tokens, strict=True)
        ]

    def figures(self, name: str) -> dict[str, Figure]:
        """Return the reward's metrics by their full names."""
        return {
            f"rewards/{name}/seconds": Figure(self.seconds, "max"),
            f"rewards/{name}/timeouts": Figure(self.timeouts, "sum"),
            f"rewards/{name}/errors": Figure(self.errors, "sum"),
            **{f"rewards/{name}/{k}": Figure(float(np.mean(v)), "mean", len(v)) for k, v in self.logged.items()},
        }


def ask_reward(reward: OpenReward, table: Table, gate_B: Float[np.ndarray, " B"] | None) -> RewardResult:
    """Return one reward's values for all rows. ``gate_B`` are the values of its gate (the reward in ``only_if``), or
    None if it has none.

    The reward is called only for rows that the gate scored above 0. Rows that the gate scored 0 or less get 0, and
    rows to which the gate does not apply get NaN. Raises RewardError for a problem, if ``on_error`` is stop.
    """
    started = time.perf_counter()
    rows, result = _rows_to_ask(table, gate_B, reward.call)
    batches = split_rows(rows, table.group_size, workers_of(reward.spec), reward.call)
    answers: dict[int, Answer] = {}
    with contextlib.closing(Feed(reward.spec.timeout, len(batches), answers.__setitem__)) as feed:
        for number, batch in enumerate(batches):
            feed.add(number, table.batch(reward.call, batch))
        feed.end()
        reward.executor.serve(feed)
    if feed.cancelled:
        raise RewardError("every batch needs an answer, and the rewards were closed before they had given it")
    for number, batch in enumerate(batches):
        _take_in(answers[number], batch, reward.spec, table, result, warn=not result.failures)
    result.seconds = time.perf_counter() - started
    return result


def _rows_to_ask(table: Table, gate_B: Float[np.ndarray, " B"] | None, call: Call) -> tuple[list[int], RewardResult]:
    """Return the rows for which the reward is called, and the result with the other rows filled in."""
    of_tokens = [NO_VALUES] * table.size if call.per_token else []
    result = RewardResult(np.full(table.size, np.nan), np.zeros(table.size, dtype=bool), of_tokens=of_tokens)
    result.skipped[list(table.failures)] = True
    rows: Sequence[int] = range(table.size)
    if gate_B is not None:
        result.values[gate_B <= 0] = 0.0
        rows = np.flatnonzero(gate_B > 0).tolist()
    return [row for row in rows if row not in table.failures], result


def _take_in(
    answer: Answer, batch: Sequence[int], spec: RewardSpec, table: Table, result: RewardResult, *, warn: bool
) -> None:
    """Write the answer for a batch, a list of rows of the table, into the result.

    With ``warn``, the first problem is logged as a warning. The metrics count all problems. Raises RewardError for a
    problem, if ``on_error`` is stop; but rows for which a shipped reward takes too long or too much memory are skipped,
    because a policy can write such texts.
    """
    shipped = SHIPPED.get(spec.name)
    result.values[list(batch)] = answer.values
    for row, values in zip(batch, answer.of_tokens, strict=False):  # a failed answer has no of_tokens
        result.of_tokens[row] = values
    for name, logged in answer.logged.items():
        result.logged.setdefault(name, []).extend(logged)
    for problem in (*answer.problems, *_too_large(answer, spec, table.step)):
        rows = list(batch) if problem.row is None else [batch[problem.row]]
        message = _describe(spec, problem, batch, rows, table)
        by_the_text = shipped is not None and shipped.deterministic and problem.kind in ("late", "died")
        on_error = "skip" if spec.on_error == "stop" and by_the_text else spec.on_error
        if on_error == "stop":
            raise RewardError(message) from (RemoteError(problem.trace) if problem.trace else None)
        if warn:
            LOG.warning("step %d: %s", table.step, message)
            warn = False
        result.failures.append((tuple(table.numbers[row] for row in rows), message))
        if problem.kind == "late":
            result.timeouts += len(rows)
        else:
            result.errors += len(rows)
        result.values[rows] = np.nan if on_error == "skip" else spec.error_value
        result.skipped[rows] = on_error == "skip"
        for row in rows if result.of_tokens else ():
            result.of_tokens[row] = NO_VALUES


def _too_large(answer: Answer, spec: RewardSpec, step: int) -> list[Problem]:
    """Return a problem for each row with a number beyond LARGEST_REWARD, or with weight 0 beyond 1e100."""
    weight = spec.weight_at(step)
    most = LARGEST_REWARD / max(abs(weight), LARGEST_REWARD / 1e100)
    largest = [np.abs(values_T).max(initial=0.0) for values_T in answer.of_tokens] or np.abs(answer.values)
    text = f"must return numbers of at most {most:g} with the weight {weight:g} (or None where it does not apply), got"
    return [Problem("wrong", f"{text} {size:g}", row) for row, size in enumerate(largest) if size > most]


def _describe(spec: RewardSpec, problem: Problem, batch: Sequence[int], rows: Sequence[int], table: Table) -> str:
    what = f"reward {spec.shown} {problem.text}"
    several = f"{len(rows)} rows from {table.numbers[rows[0]]} to {table.numbers[rows[-1]]}"
    where = table.shown(rows[0]) if len(rows) == 1 else several
    match problem.kind:
        case "late":
            return f"{what} within its timeout of {spec.timeout:g} s, for {where}; make it faster, or raise timeout"
        case "died":
            return f"{what}, for {where}; a reward must not end its process, nor want more memory than there is"
        case "raised" if problem.failing_row is not None:
            failing = table.shown(batch[problem.failing_row])
            return f"{what}; {failing} raises on its own. Return None for rows the reward does not apply to"
        case "raised" if problem.row is None and spec.on_error == "stop":  # the failing row was searched for
            return f"{what}; no row raises on its own, so it takes several together"
        case "raised":
            return f"{what}; for {where}. Return None for rows the reward does not apply to"
    return what if problem.row is None else f"{what} for {where}"


# --- a group at a time, while others are sampled ---------------------------------------------------------------------


@dataclass
class _OpenGroup:
    """A group with batches that are not answered yet."""

    table: Table
    result: RewardResult
    batches: list[list[int]]
    answers: dict[int, Answer] = field(default_factory=dict)
    """Number of a batch -> its answer."""


class Groups:
    """Calls one reward for groups of rows as the groups are sampled, and collects the reward's values.

    Args:
        expected: the expected number of groups.
        rollouts: the number of rollouts that the groups come from; the timeout after ``end`` is multiplied by it.
    """

    def __init__(self, reward: OpenReward, expected: int, rollouts: int):
        call, workers = reward.call, workers_of(reward.spec)
        self._batches_per_group = max(1, workers) if call.concurrency is not None and not call.is_async else 1
        batches = expected * self._batches_per_group
        weight = min(1.0, most_batches(workers, call) / max(1, batches))
        joins = call.is_async and call.concurrency is not None
        self.reward = reward
        self.feed = Feed(reward.spec.timeout, batches, self._take, joins=joins, weight=weight)
        self.followers: list[Groups] = []
        """The `Groups` of the rewards that have this reward as their gate."""
        self.served: Future[None] = Future()
        self.results: dict[Group, RewardResult] = {}
        self._rollouts = rollouts
        self._open: dict[Group, _OpenGroup] = {}
        self._warned = False

    def start(self, threads: ThreadPoolExecutor) -> None:
        """Start the executor on a thread. When the executor stops, ``end`` of the followers is called."""
        self.served = threads.submit(self.reward.executor.serve, self.feed)
        self.served.add_done_callback(lambda _: [follower.end() for follower in self.followers])

    def ask(self, group: Group, table: Table, gate: RewardResult | None = None) -> None:
        """Queue the rows of a group; if the reward has a gate, only the rows that the gate scored above 0.

        For a synchronous function of one row, the group is split into a batch per worker: with two workers, rows 0 to 4
        become ``[[0, 1, 2], [3, 4]]``. For any other function the group is a single batch.
        """
        rows, result = _rows_to_ask(table, None if gate is None else gate.values, self.reward.call)
        each = max(1, math.ceil(len(rows) / self._batches_per_group))
        batches = [list(batch) for batch in itertools.batched(rows, each)]
        self._open[group] = _OpenGroup(table, result, batches)
        for number, batch in enumerate(batches):
            self.feed.add((group, number), table.batch(self.reward.call, batch))
        if not batches:
            self._complete(group)

    def end(self) -> None:
        """Mark that all groups are queued."""
        self.feed.end(self._rollouts)

    def result(self, rollout: int, prompts: Sequence[int]) -> RewardResult:
        """Wait for the executor to end, and return the values of some prompts of a rollout. If the reward has a gate,
        wait for the gate's result first. Raises RewardError for a problem, if ``on_error`` is stop."""
        self.served.result()
        parts = [self.results[rollout, prompt] for prompt in prompts]
        logged: dict[str, list[float]] = {}
        for part in parts:
            for name, values in part.logged.items():
                logged.setdefault(name, []).extend(values)
        return RewardResult(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.skipped for part in parts]),
            self.feed.seconds,
            sum(part.timeouts for part in parts),
            sum(part.errors for part in parts),
            logged,
            [values for part in parts for values in part.of_tokens],
            [failure for part in parts for failure in part.failures],
        )

    def _take(self, key: tuple[Group, int], answer: Answer) -> None:
        """Store a batch's answer. A group's last answer completes the group; with ``on_error: stop``, a problem raises
        RewardError before that."""
        group, number = key
        asked, spec = self._open[group], self.reward.spec
        asked.answers[number] = answer
        if len(asked.answers) < len(asked.batches) and not (answer.problems and spec.on_error == "stop"):
            return
        for number, answer in sorted(asked.answers.items()):
            _take_in(answer, asked.batches[number], spec, asked.table, asked.result, warn=not self._warned)
            self._warned |= bool(answer.problems)
        self._complete(group)

    def _complete(self, group: Group) -> None:
        """Store a group's result, and queue the group for the rewards that have this reward as their gate."""
        done = self._open.pop(group)
        self.results[group] = done.result
        for follower in self.followers:
            follower.ask(group, done.table, done.result)
