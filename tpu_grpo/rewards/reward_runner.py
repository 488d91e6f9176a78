"""Asks one reward for the values of rows, in worker processes or on a thread, and treats problems by ``on_error``.

    table = build_table(rollout, calls)                     # the columns that the rewards need, each [B]
    result = score_table(reward, table, gate_B)             # all rows of a rollout at once

    runner = RewardRunner(reward, groups=32)                # or one group at a time, while other groups are sampled
    runner.start(threads)                                   # hands out the batches, on another thread
    runner.add((0, 3), table_of_prompt_3)                   # queues a group's rows
    runner.end()                                            # no more groups will come
    result = runner.result(0, prompts=range(32))            # waits for the rows that are not answered yet

A reward's gate is the reward that it names in ``only_if``. When a gate has scored a group, the gate's thread queues the
group for the rewards that depend on the gate.

There are two time limits. A batch must be answered ``timeout`` seconds after a worker or the thread gets it. All
batches must be answered ``rollouts * timeout`` seconds after the runner's thread notices the call of ``end``.
"""

import hashlib
import itertools
import logging
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, override

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import LARGEST_REWARD, RewardError
from tpu_grpo.records.stages import Figure
from tpu_grpo.rewards.reward_call import (
    NO_VALUES,
    Answer,
    Call,
    Caller,
    Problem,
    RewardBatch,
    TokenValues,
    failed_answer,
)
from tpu_grpo.rewards.reward_functions import workers_of
from tpu_grpo.rewards.reward_table import Table
from tpu_grpo.rewards.shipped import SHIPPED

LOG = logging.getLogger("tpu_grpo.rewards")
_BATCHES_PER_WORKER = 4
"""With several batches per worker, other workers can take the remaining ones while one worker has a slow batch."""
CLOSE_SECONDS = 5.0
POLL_SECONDS = 0.5
LATE = Problem("late", "did not answer")
_BUSY = Problem("late", "still works on an earlier batch; give it a worker process, which can be ended")
Group = tuple[int, int]
"""(number of the rollout, number of the prompt in it)."""


@dataclass(frozen=True)
class OpenReward:
    """A reward of the config, its call, and what runs it."""

    spec: RewardSpec
    call: Call
    workers: "RewardBackend"

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


# --- the batches of a reward ----------------------------------------------------------------------------------------


def split_rows(rows: Sequence[int], group_size: int, most: int, call: Call) -> list[list[int]]:
    """Split rows, in ascending order, into at most ``most`` batches.

    For a function of a batch, each batch is made of whole groups: with groups of 2 and at most four batches, rows 0 to
    7 become ``[[0, 1], [2, 3], [4, 5], [6, 7]]``.
    """
    group_of = (lambda row: row // group_size) if call.concurrency is None else None
    units = [list(unit) for _, unit in itertools.groupby(rows, group_of)]
    each = max(1, math.ceil(len(units) / most))
    return [list(itertools.chain(*batch)) for batch in itertools.batched(units, each)]


def most_batches(workers: int, call: Call) -> int:
    """Return the largest number of batches for the rows of a step: four per worker, or one per worker for an async
    function, which awaits the rows of a batch together. A function of a batch with one worker gets all rows at once."""
    if workers <= 1 and call.concurrency is None:
        return 1
    return max(1, workers) * (1 if call.is_async else _BATCHES_PER_WORKER)


# --- where a reward runs: in worker processes, or on a thread --------------------------------------------------------


@dataclass(eq=False)
class Task:
    """The work that a worker or the thread gets in one request: one batch, or several joined batches."""

    batches: tuple["Batch", ...]
    asked: RewardBatch
    until: float
    """The deadline, by the clock time.monotonic()."""
    answers: list[tuple["Task", Answer]]
    """The list to which this task and its answer are appended."""

    def fail(self, problem: Problem) -> None:
        """Store an answer with this problem for all rows."""
        self.answers.append((self, failed_answer(self.asked.size, problem)))


class RewardBackend:
    """Where a reward is called, for one `RewardRunner` at a time."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._runner: RewardRunner | None = None

    @contextmanager
    def serving(self, runner: "RewardRunner") -> Iterator[None]:
        """Prepare to work for a runner, and give up its tasks at the end. Waits if another runner is served."""
        with self._busy:
            self._runner = runner
            try:
                with self._opened(runner):
                    yield
            finally:
                self._runner = None

    def close(self) -> None:
        """Cancel the current runner, close the reward, and end its processes or thread.

        A busy process is ended immediately; a call that still runs on a thread cannot be ended.
        """
        if (runner := self._runner) is not None:
            runner.cancel()
            if self._busy.acquire(timeout=CLOSE_SECONDS):  # gives the runner time to end busy processes
                self._busy.release()
        self._end()

    def _opened(self, runner: "RewardRunner") -> AbstractContextManager[None]:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        """Let ``advance`` return; may be called on any thread."""
        raise NotImplementedError

    @property
    def problem(self) -> Problem | None:
        """Why no task can be begun for the current runner; None if tasks can."""
        raise NotImplementedError

    @property
    def idle(self) -> int:
        """The number of workers without a task."""
        raise NotImplementedError

    def begin(self, task: Task, weight: float) -> None:
        """Send a task to an idle worker."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Wait for current calls no longer, and end the processes that work on them."""
        raise NotImplementedError

    def keep(self, wanted: int) -> None:
        """Start workers for ``wanted`` batches, up to the configured count; idle workers are not ended."""
        raise NotImplementedError

    def advance(self, seconds: float) -> None:
        """Wait up to ``seconds`` for answers, and enforce deadlines. Raises RewardError if the reward was never set up,
        and on a thread KeyboardInterrupt."""
        raise NotImplementedError


class RewardThread(RewardBackend):
    """Runs a quick reward on a thread of the main process. A call that misses its deadline is reported as late, but
    cannot be stopped; until it ends, all later batches are late as well."""

    def __init__(self, call: Call, target: Any):
        super().__init__()
        self._call, self._target = call, target
        self._requests: queue.SimpleQueue[tuple[RewardBatch, float, Future[Answer]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._task: Task | None = None
        self._future: Future[Answer] | None = None
        """The answer of the latest call; ``_task`` is None if the answer is not waited for."""

    @contextmanager
    def _opened(self, runner: "RewardRunner") -> Iterator[None]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"reward {self._call.name}", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self.give_up()

    def _end(self) -> None:
        if self._thread is not None and self.problem is None:
            self._requests.put(None)
            self._thread.join(timeout=CLOSE_SECONDS)

    @override
    def wake(self) -> None:
        self._woken.set()

    @property
    @override
    def problem(self) -> Problem | None:
        is_overdue = self._task is None and self._future is not None and not self._future.done()
        return _BUSY if is_overdue else None

    @property
    @override
    def idle(self) -> int:
        return int(self._task is None)

    @override
    def begin(self, task: Task, weight: float) -> None:
        self._task, self._future = task, Future()
        self._future.add_done_callback(lambda _: self.wake())
        self._requests.put((task.asked, task.until - time.monotonic(), self._future))

    @override
    def advance(self, seconds: float) -> None:
        task, future = self._task, self._future
        if task is None or future is None or not future.done():
            self._woken.wait(seconds if task is None else max(0.0, min(seconds, task.until - time.monotonic())))
            self._woken.clear()
        if task is None or future is None:
            return
        if future.done():
            self._task = None
            task.answers.append((task, future.result()))
        elif time.monotonic() >= task.until:
            self._task = None
            task.fail(LATE)

    @override
    def give_up(self) -> None:
        self._task = None

    @override
    def keep(self, wanted: int) -> None:
        pass  # there is one thread, whatever is wanted

    def _serve(self) -> None:
        caller: Caller | None = None
        while (request := self._requests.get()) is not None:
            batch, seconds, future = request
            try:
                caller = caller or self._set_up()
                future.set_result(caller.answer(batch, seconds))
            except BaseException as error:  # raised again where the answer is awaited
                future.set_exception(error)
        if caller is not None:
            caller.close()

    def _set_up(self) -> Caller:
        try:
            return Caller(self._call, self._target)
        except (Exception, SystemExit) as error:  # user code can raise anything
            raise RewardError(
                f"reward {self._call.name} could not be set up: {type(error).__name__}: {error}\n"
                f"{traceback.format_exc()}".rstrip()
            ) from error


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


@dataclass(eq=False)
class _OpenGroup:
    """A group with batches that are not answered yet."""

    key: Group
    table: Table
    result: RewardResult
    batches: list[list[int]]
    """The rows of each batch."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Number of a batch -> its answer."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of a group."""

    group: _OpenGroup
    number: int
    asked: RewardBatch


class RewardRunner:
    """Asks one reward for the rows of groups, and collects its values; a queue of batches for the reward's workers.

    Args:
        groups: the expected number of groups; None if all rows are added at once.
        rollouts: the number of rollouts that the groups come from; the timeout after ``end`` is multiplied by it.
    """

    def __init__(self, reward: OpenReward, groups: int | None = None, rollouts: int = 1):
        call, workers = reward.call, workers_of(reward.spec)
        most, of_rows = most_batches(workers, call), call.concurrency is not None
        by_group = max(1, workers) if of_rows and not call.is_async else 1
        self.reward = reward
        self.followers: list[RewardRunner] = []
        """The runners of the rewards that have this reward as their gate."""
        self.results: dict[Group, RewardResult] = {}
        self.served: Future[None] | None = None
        """Done once all batches are answered; None before ``start``."""
        self.cancelled = False
        self._most_batches = most if groups is None else by_group
        self._expected = (groups or 0) * by_group
        self._weight = min(1.0, most / max(1, self._expected))
        self._joins = of_rows and call.is_async
        """Whether batches that wait are joined into one task, because its rows are awaited together."""
        self._rollouts = rollouts
        self._lock = threading.Lock()
        self._waiting: deque[Batch] = deque()
        self._unanswered: list[Batch] = []
        self._answers: list[tuple[Task, Answer]] = []
        """The tasks whose answers have come, and are not taken in yet."""
        self._answered = 0
        self._has_ended = False
        self._deadline = math.inf
        self._seconds = self._busy_since = 0.0
        """The total time during which at least one batch was unanswered, and the start of the latest such time."""
        self._has_warned = False

    # --- for the code that adds groups ---

    def start(self, threads: ThreadPoolExecutor) -> None:
        """Hand out the batches on a thread. When the thread ends, ``end`` of the followers is called."""
        self.served = threads.submit(self.serve)
        self.served.add_done_callback(lambda _: [follower.end() for follower in self.followers])

    def add(self, key: Group, table: Table, gate_B: Float[np.ndarray, " B"] | None = None) -> None:
        """Queue the rows of a group; ``gate_B`` are the values of the reward's gate, None if it has none.

        The reward is called only for rows that the gate scored above 0. Rows that the gate scored 0 or less get 0, and
        rows to which the gate does not apply get NaN.

        For a synchronous function of one row, the group is split into a batch per worker: with two workers, rows 0 to 4
        become ``[[0, 1, 2], [3, 4]]``. For any other function the group is a single batch.
        """
        call = self.reward.call
        of_tokens = [NO_VALUES] * table.size if call.per_token else []
        result = RewardResult(np.full(table.size, np.nan), np.zeros(table.size, dtype=bool), of_tokens=of_tokens)
        result.skipped[list(table.failures)] = True
        rows: Sequence[int] = range(table.size)
        if gate_B is not None:
            result.values[gate_B <= 0] = 0.0
            rows = np.flatnonzero(gate_B > 0).tolist()
        asked = [row for row in rows if row not in table.failures]
        group = _OpenGroup(key, table, result, split_rows(asked, table.group_size, self._most_batches, call))
        if not group.batches:
            self._complete(group)
            return
        batches = [Batch(group, number, table.batch(call, rows)) for number, rows in enumerate(group.batches)]
        with self._lock:
            if not self._unanswered:
                self._busy_since = time.monotonic()
            self._unanswered += batches
            self._waiting += batches
        self.reward.workers.wake()

    def check(self) -> None:
        """Raise the error that has ended the thread, if there is one; to be called before ``end``."""
        if self.served is not None and self.served.done():
            self.served.result()

    def end(self) -> None:
        """Mark that all groups are added."""
        self._has_ended = True
        self.reward.workers.wake()

    def cancel(self) -> None:
        """Mark that answers are no longer needed."""
        self.cancelled = True
        self.reward.workers.wake()

    def result(self, rollout: int, prompts: Sequence[int]) -> RewardResult:
        """Wait for the thread to end, and return the values of some prompts of a rollout. If the reward has a gate,
        wait for the gate's result first. Raises the errors of ``serve``."""
        if self.served is not None:
            self.served.result()
        if self.cancelled:
            raise RewardError("every batch needs an answer, and the rewards were closed before they had given it")
        parts = [self.results[rollout, prompt] for prompt in prompts]
        logged: dict[str, list[float]] = {}
        for part in parts:
            for name, values in part.logged.items():
                logged.setdefault(name, []).extend(values)
        return RewardResult(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.skipped for part in parts]),
            self._seconds,
            sum(part.timeouts for part in parts),
            sum(part.errors for part in parts),
            logged,
            [values for part in parts for values in part.of_tokens],
        )

    # --- the queue ---

    @property
    def left(self) -> int:
        """Return the number of unanswered batches, including those that are expected to come."""
        with self._lock:
            return max(len(self._unanswered), 0 if self._has_ended else self._expected - self._answered)

    @property
    def is_over(self) -> bool:
        """Whether all batches are answered and no more will come, or the runner is cancelled."""
        with self._lock:
            return self.cancelled or (self._has_ended and not self._unanswered)

    @property
    def deadline(self) -> float:
        """Return the time.monotonic() by which all batches must be answered; infinity as long as more may come."""
        if self._has_ended and self._deadline == math.inf:
            self._deadline = time.monotonic() + self._rollouts * self.reward.spec.timeout
        return self._deadline

    def serve(self) -> None:
        """Let the reward's workers answer the batches, until all are answered and no more will come.

        Raises:
            RewardError: if the reward could never be set up, or for a problem if ``on_error`` is stop.
            KeyboardInterrupt: if a reward on a thread raised it.
        """
        workers = self.reward.workers
        with workers.serving(self):
            while not self.is_over:
                left = self.deadline - time.monotonic()
                if problem := workers.problem or (LATE if left <= 0 else None):
                    workers.give_up()
                    self._answers.clear()
                    self._fail_all(problem)
                else:
                    while (places := workers.idle) and (task := self.take(places)) is not None:
                        workers.begin(task, self._weight * len(task.batches))
                workers.advance(0.0 if self.is_over else min(max(left, 0.0), POLL_SECONDS))
                while self._answers:
                    task, answer = self._answers.pop(0)
                    sizes = [batch.asked.size for batch in task.batches]
                    for batch, part in zip(task.batches, answer.split(sizes), strict=True):
                        self._take_in(batch, part)
                workers.keep(self.left)

    def take(self, places: int = 1) -> Task | None:
        """Take the next waiting batch, or 1 / ``places`` of them if batches are joined; None if none waits."""
        until = min(time.monotonic() + self.reward.spec.timeout, self.deadline)
        with self._lock:
            if not self._waiting:
                return None
            count = math.ceil(len(self._waiting) / places) if self._joins else 1
            batches = tuple(self._waiting.popleft() for _ in range(count))
        return Task(batches, RewardBatch.joined([batch.asked for batch in batches]), until, self._answers)

    def _fail_all(self, problem: Problem) -> None:
        """Answer all unanswered batches with a problem."""
        with self._lock:
            self._waiting.clear()
            unanswered = [*self._unanswered]
        for batch in unanswered:
            self._take_in(batch, failed_answer(batch.asked.size, problem))

    # --- what the reward answers ---

    def _take_in(self, batch: Batch, answer: Answer) -> None:
        """Store a batch's answer. A group's last answer completes the group; a problem that ends the run does not wait
        for it, and raises RewardError."""
        with self._lock:
            self._unanswered.remove(batch)
            self._answered += 1
            if not self._unanswered:
                self._seconds += time.monotonic() - self._busy_since
        group = batch.group
        group.answers[batch.number] = answer
        ends_run = any(self._on_error(problem) == "stop" for problem in answer.problems)
        if len(group.answers) == len(group.batches) or ends_run:
            for number, found in sorted(group.answers.items()):
                self._write(found, group.batches[number], group)
            self._complete(group)

    def _complete(self, group: _OpenGroup) -> None:
        """Store a group's result, and queue the group for the rewards that have this reward as their gate."""
        self.results[group.key] = group.result
        for follower in self.followers:
            follower.add(group.key, group.table, group.result.values)

    def _on_error(self, problem: Problem) -> str:
        """Return what happens to the rows of a problem. Rows for which a deterministic shipped reward takes too long or
        too much memory do not end a run, but are skipped, because a policy can write such texts."""
        spec, shipped = self.reward.spec, SHIPPED.get(self.reward.spec.name)
        by_the_text = shipped is not None and shipped.deterministic and problem.kind in ("late", "died")
        return "skip" if spec.on_error == "stop" and by_the_text else spec.on_error

    def _write(self, answer: Answer, batch: Sequence[int], group: _OpenGroup) -> None:
        """Write the answer for a batch, a list of rows of the group's table, into the group's result.

        The first problem is logged as a warning; the metrics count all problems. Raises RewardError for a problem, if
        ``on_error`` is stop.
        """
        spec, table, result = self.reward.spec, group.table, group.result
        result.values[list(batch)] = answer.values
        # a failed answer has no of_tokens
        for row, values in zip(batch, answer.of_tokens, strict=bool(answer.of_tokens)):
            result.of_tokens[row] = values
        for name, logged in answer.logged.items():
            result.logged.setdefault(name, []).extend(logged)
        for problem in (*answer.problems, *_too_large(answer, spec, table.step)):
            rows = list(batch) if problem.row is None else [batch[problem.row]]
            message, on_error = _describe(spec, problem, batch, rows, table), self._on_error(problem)
            if on_error == "stop":
                raise RewardError(message) from (RemoteError(problem.trace) if problem.trace else None)
            if not self._has_warned:
                LOG.warning("step %d: %s", table.step, message)
                self._has_warned = True
            if problem.kind == "late":
                result.timeouts += len(rows)
            else:
                result.errors += len(rows)
            result.values[rows] = np.nan if on_error == "skip" else spec.error_value
            result.skipped[rows] = on_error == "skip"
            for row in rows if result.of_tokens else ():
                result.of_tokens[row] = NO_VALUES


def score_table(reward: OpenReward, table: Table, gate_B: Float[np.ndarray, " B"] | None) -> RewardResult:
    """Return one reward's values for all rows of a table; see `RewardRunner.add` and `RewardRunner.serve`."""
    runner = RewardRunner(reward)
    runner.add((0, 0), table, gate_B)
    runner.end()
    runner.serve()
    return runner.result(0, [0])


# --- problems ---------------------------------------------------------------------------------------------------------


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
        case "wrong":
            return what if problem.row is None else f"{what} for {where}"
