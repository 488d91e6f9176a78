"""An executor runs a reward: in worker processes of its own, or on a thread of the main process.

executor.serve(feed)                               # answers what the feed brings, until it is over
answers = run(executor, [batch, ...], seconds)     # one Answer per batch within the deadline, whatever happens
executor.close()
"""

import base64
import contextlib
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from selectors import EVENT_READ
from typing import Any, Protocol

import numpy as np

from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards.calling import Answer, Call, Caller, Problem, RewardBatch, failed_answer
from tpu_grpo.rewards.feed import Feed, Served, Task
from tpu_grpo.rewards.reward_functions import find_reward
from tpu_grpo.workers.channel import FOREIGN, BrokenChannelError
from tpu_grpo.workers.messages import Mode
from tpu_grpo.workers.supervisor import Crew, Session, StartError, Supervisor

_LATE = Problem("late", "did not answer")
_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.5


class Executor(Protocol):
    """An executor runs one reward and keeps its deadlines. It serves one feed at a time."""

    def serve(self, feed: Feed) -> None:
        """Answer what the feed brings, until it is over; raises what the feed's ``answered`` raises."""
        ...

    def close(self) -> None:
        """Let the reward close, and end what was started."""
        ...


def run(executor: Executor, batches: Sequence[RewardBatch], seconds: float) -> list[Answer]:
    """Return the answers to batches that are all there, within ``seconds`` for all of them together.

    Raises:
        RewardError: if the reward never could be set up.
    """
    answers: dict[Any, Answer] = {}
    with contextlib.closing(Feed(seconds, len(batches), answers.__setitem__)) as feed:
        for index, batch in enumerate(batches):
            feed.add(index, batch)
        feed.end()
        executor.serve(feed)
        if feed.cancelled:
            raise RewardError("every batch needs an answer, and the rewards were closed before they had given it")
    return [answers[index] for index in range(len(batches))]


# --- in processes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerOfWorker:
    """An answer as a worker sends it."""

    values: list[float]
    problems: list[Problem]
    logged: dict[str, list[float]]
    of_tokens: list[bytes]
    """Each row's numbers as base64 of float64, as the machine has them."""

    def read(self, batch: RewardBatch) -> Answer:
        """Return the answer about a batch.

        Raises:
            ValueError: for one that is no answer about this batch.
        """
        rows = (*(p.row for p in self.problems), *(p.failing_row for p in self.problems))
        of_tokens = [np.frombuffer(base64.b64decode(data, validate=True), np.float64).copy() for data in self.of_tokens]
        numbers = [*self.values, *(value for values in self.logged.values() for value in values)]
        lengths = [len(ids) for ids in batch.columns["completion_ids"]] if of_tokens else []
        if (
            len(self.values) != batch.size
            or any(math.isinf(number) for number in numbers)
            or not all(row is None or 0 <= row < batch.size for row in rows)
            or len(of_tokens) != len(lengths)
            or not all(
                len(values_T) in (0, length) and np.isfinite(values_T).all()
                for values_T, length in zip(of_tokens, lengths, strict=True)
            )
        ):
            raise ValueError("the answer does not fit the batch")
        return Answer(self.values, self.problems, self.logged, of_tokens)


class CalledReward:
    """A reward as a `Service` of workers, which are asked about one batch after the other."""

    mode: Mode = "in turn"
    start = "set up"
    replies: tuple[type, ...] = (AnswerOfWorker,)
    most_bytes = 2**30

    def __init__(self, call: Call):
        self.call, self.name, self.secrets = call, f"reward {call.name}", call.secrets

    def set_up(self) -> None:
        """Find the reward and set it up; raises what that raises."""
        self._caller = Caller(self.call, find_reward(self.call.source))

    @contextmanager
    def answering(self, went_on: Callable[[], None]) -> Iterator[Callable[[RewardBatch, float], AnswerOfWorker]]:
        """Give what asks the reward about a batch; lets the reward close at the end."""

        def answer(batch: RewardBatch, seconds: float) -> AnswerOfWorker:
            found = self._caller.answer(batch, seconds)
            of_tokens = [base64.b64encode(np.asarray(v, np.float64).tobytes()) for v in found.of_tokens]
            return AnswerOfWorker(found.values, found.problems, found.logged, of_tokens)

        yield answer
        self._caller.close()


class _BatchSession(Session):
    """A task that a worker has; its answer is kept until the pool passes it on."""

    def __init__(self, task: Task, answers: list[tuple[Task, Answer]], supervisor: Supervisor):
        self._task, self._answers, self._supervisor = task, answers, supervisor

    def replied(self, reply: AnswerOfWorker) -> None:
        """Take the worker's answer."""
        try:
            answer = reply.read(self._task.batch)
        except (ValueError, KeyError) as error:
            raise BrokenChannelError(FOREIGN) from error
        self._answers.append((self._task, answer))
        self._supervisor.release(self, 0.0)

    def late(self, *, has_begun: bool) -> None:
        """Take note that there was no answer in time."""
        self._answers.append((self._task, failed_answer(self._task.batch.size, _LATE)))

    def lost(self, how: str) -> None:
        """Take note that the worker is gone; the batch is not tried again."""
        died = Problem("died", f"lost its worker, which {how}")
        self._answers.append((self._task, failed_answer(self._task.batch.size, died)))


class WorkerPool:
    """A pool has ``count`` worker processes of one reward.

    Workers are started when a feed needs them, and replaced when they die, hang, or have had ``recycle`` calls.
    """

    def __init__(self, call: Call, memory_bytes: int, count: int, recycle: int):
        self._service, self._memory_bytes = CalledReward(call), memory_bytes
        self._count, self._recycle = count, recycle
        self._supervisor: Supervisor | None = None
        self._problem: Problem | None = None
        """Why workers cannot be set up, of the present feed."""
        self._answers: list[tuple[Task, Answer]] = []
        self._served = Served()

    def serve(self, feed: Feed) -> None:
        """Answer what the feed brings. A batch whose worker dies is not tried again.

        Raises:
            RewardError: if the reward never could be set up.
        """
        with self._served(feed):
            if self._supervisor is None:
                self._supervisor = Supervisor()
                self._supervisor.add(self._service, self._memory_bytes)
            supervisor, (crew,), self._problem = self._supervisor, self._supervisor.crews, None
            supervisor.selector.register(feed, EVENT_READ, feed.hush)
            try:
                self._keep(crew, feed.expected)
                while self._problem is None and not feed.cancelled and not all(w.is_ready for w in crew.workers):
                    self._advance(supervisor, crew, _POLL_SECONDS, is_starting=True)
                while not feed.over:
                    self._go_on(feed, supervisor, crew)
            finally:
                supervisor.selector.unregister(feed)
                self._end_busy(supervisor, crew)
                for worker in [worker for worker in crew.workers if worker.begun >= self._recycle]:
                    crew.end(worker, _CLOSE_SECONDS)
            if not feed.cancelled:
                self._keep(crew, feed.expected)

    def close(self) -> None:
        """Let the reward close in each worker, and end them; one that is at work is ended at once."""
        self._served.give_up()
        if self._supervisor is not None:
            self._supervisor.close(_CLOSE_SECONDS)
            self._supervisor = None

    def _go_on(self, feed: Feed, supervisor: Supervisor, crew: Crew) -> None:
        """Hand out what waits, and take in what comes within a moment."""
        left = feed.deadline - time.monotonic()
        if self._problem or left <= 0:
            self._end_busy(supervisor, crew)
            feed.answer_all(self._problem or _LATE)
            self._advance(supervisor, crew, 0.0 if feed.over else _POLL_SECONDS)
            return
        idle = [worker for worker in crew.workers if worker.is_ready and not worker.sessions]
        for number, worker in enumerate(idle):
            if (task := feed.take(len(idle) - number)) is None:
                break
            session = _BatchSession(task, self._answers, supervisor)
            crew.begin(session, worker, weight=feed.weight * len(task.keys))
            supervisor.ask(session, task.batch, task.until - time.monotonic())
        self._advance(supervisor, crew, min(left, _POLL_SECONDS))
        while self._answers:
            feed.answer(*self._answers.pop(0))
        self._keep(crew, feed.left)

    def _advance(self, supervisor: Supervisor, crew: Crew, seconds: float, *, is_starting: bool = False) -> None:
        """Take in what comes within ``seconds``; workers that cannot be set up are a problem for this feed.

        Raises:
            RewardError: if none ever was, as going on has no use then.
        """
        try:
            if is_starting:
                crew.starting.waited_for()
            supervisor.advance(0.0 if supervisor.hear(0.0) else seconds)
        except StartError as error:
            crew.count = 0
            for worker in [worker for worker in crew.workers if not worker.is_ready]:
                crew.end(worker, 0.0)
            if not crew.starting.was_ready:
                raise RewardError(str(error)) from None
            text, _, trace = str(error).removeprefix(f"{self._service.name} ").partition("\n")
            self._problem = Problem("died", text, trace=trace)

    def _keep(self, crew: Crew, wanted: int) -> None:
        """Have as many workers as there is work for; none are ended for lack of it."""
        if self._problem is None:
            crew.count = max(len(crew.workers), min(self._count, wanted))
            crew.fill()

    def _end_busy(self, supervisor: Supervisor, crew: Crew) -> None:
        for worker in [worker for worker in crew.workers if worker.sessions]:
            for session in [*worker.sessions.values()]:
                supervisor.release(session, 0.0)
            crew.end(worker, 0.0)
        self._answers.clear()


# --- on a thread -----------------------------------------------------------------------------------------------------


class ThreadExecutor:
    """A thread of the main process runs a cheap reward; a deadline is kept by going on without the answer."""

    def __init__(self, call: Call, target: Any):
        self._call = call
        self._target = target
        self._requests: queue.SimpleQueue[tuple[RewardBatch, float, Future[Answer]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: Future[Answer] | None = None
        self._served = Served()

    def serve(self, feed: Feed) -> None:
        """Answer what the feed brings.

        Raises:
            RewardError: if the reward could not be set up.
            KeyboardInterrupt: if that is what the reward raised.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"reward {self._call.name}", daemon=True)
            self._thread.start()
        with self._served(feed):
            while not feed.over:
                if (task := feed.take()) is None:
                    feed.wait(None)
                else:
                    feed.answer(task, self._ask(task, feed))

    def close(self) -> None:
        """Let the reward close, and wait a moment for it; one that is at work on a thread cannot be ended."""
        self._served.give_up()
        if self._overdue is not None and not self._overdue.done():
            return
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(timeout=5.0)

    def _ask(self, task: Task, feed: Feed) -> Answer:
        if self._overdue is not None and not self._overdue.done():
            busy = Problem("late", "still works on an earlier batch; give it a worker process, which can be ended")
            return failed_answer(task.batch.size, busy)
        if task.until <= time.monotonic():
            return failed_answer(task.batch.size, _LATE)
        future: Future[Answer] = Future()
        future.add_done_callback(lambda _: feed.ring())
        self._requests.put((task.batch, task.until - time.monotonic(), future))
        while not future.done() and (left := task.until - time.monotonic()) > 0 and not feed.cancelled:
            feed.wait(left)
        if future.done():
            return future.result()
        self._overdue = future
        return failed_answer(task.batch.size, _LATE)

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
        except (Exception, SystemExit) as error:  # user code: anything can come
            raise RewardError(
                f"reward {self._call.name} could not be set up: {type(error).__name__}: {error}\n"
                f"{traceback.format_exc()}".rstrip()
            ) from error
