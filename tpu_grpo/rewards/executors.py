"""Executors run a reward in worker processes of its own, or on a thread of the main process.

executor.serve(feed)        # answers the feed's batches within their deadlines, until the feed is over
executor.close()
"""

import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from selectors import EVENT_READ
from typing import Any

from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards.feed import Feed, Task
from tpu_grpo.rewards.reward_call import Answer, Call, Caller, Problem, RewardBatch, failed_answer
from tpu_grpo.rewards.reward_functions import find_reward
from tpu_grpo.workers.channel import FOREIGN, BrokenChannelError
from tpu_grpo.workers.messages import Mode
from tpu_grpo.workers.supervisor import Crew, Session, StartError, Supervisor

_LATE = Problem("late", "did not answer")
_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.5


class Executor(ABC):
    """Runs one reward on the batches of a `Feed`, and enforces the batches' deadlines; serves one feed at a time."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._feed: Feed | None = None

    def serve(self, feed: Feed) -> None:
        """Answer the feed's batches until the feed is over. Waits first if another thread serves a feed.

        Raises:
            RewardError: if the reward could never be set up. Exceptions of the feed's ``answered`` pass through, too.
            KeyboardInterrupt: if a reward on a thread raised it.
        """
        with self._busy:
            self._feed = feed
            try:
                self._answer(feed)
            finally:
                self._feed = None

    def close(self) -> None:
        """Cancel the current feed, close the reward, and end its workers or thread.

        A busy worker is ended immediately; a call that still runs on a thread cannot be ended.
        """
        if (feed := self._feed) is not None:
            feed.cancel()
            if self._busy.acquire(timeout=_CLOSE_SECONDS):  # gives ``serve`` time to end busy workers
                self._busy.release()
        self._end()

    @abstractmethod
    def _answer(self, feed: Feed) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


# --- in processes ----------------------------------------------------------------------------------------------------


class CalledReward:
    """A reward as a `Service` (tpu_grpo/workers/messages.py); each worker answers one batch at a time."""

    mode: Mode = "in turn"
    start = "set up"
    replies: tuple[type, ...] = (Answer,)
    most_bytes = 2**30

    def __init__(self, call: Call):
        self.call, self.name, self.secrets = call, f"reward {call.name}", call.secrets

    def set_up(self) -> None:
        """Find the reward and set it up; raises whatever the reward's code raises."""
        self._caller = Caller(self.call, find_reward(self.call.source))

    @contextmanager
    def answering(self, went_on: Callable[[], None]) -> Iterator[Callable[[RewardBatch, float], Answer]]:
        """Yield the function that calls the reward on a batch; close the reward at the end."""
        yield self._caller.answer
        self._caller.close()


class _BatchSession(Session):
    """A worker's work on one task; it appends the task's answer to ``answers``, from where `WorkerPool` takes it."""

    def __init__(self, task: Task, answers: list[tuple[Task, Answer]], supervisor: Supervisor):
        self._task, self._answers, self._supervisor = task, answers, supervisor

    def replied(self, reply: Answer) -> None:
        """Store the worker's answer; raises BrokenChannelError if the answer does not fit the batch."""
        if not reply.fits(self._task.batch):
            raise BrokenChannelError(FOREIGN)
        self._answers.append((self._task, reply))
        self._supervisor.release(self, 0.0)

    def late(self, *, has_begun: bool) -> None:
        """Store an answer with the problem that the worker was late."""
        self._answers.append((self._task, failed_answer(self._task.batch.size, _LATE)))

    def lost(self, how: str) -> None:
        """Store an answer with the problem that the worker has ended; the batch is not retried."""
        died = Problem("died", f"lost its worker, which {how}")
        self._answers.append((self._task, failed_answer(self._task.batch.size, died)))


class WorkerPool(Executor):
    """Runs one reward in ``count`` worker processes.

    Workers are started when a feed needs them, and replaced when they die, miss a deadline, or have had ``recycle``
    calls. A batch whose worker dies is not tried again.
    """

    def __init__(self, call: Call, memory_bytes: int, count: int, recycle: int):
        super().__init__()
        self._service, self._memory_bytes = CalledReward(call), memory_bytes
        self._count, self._recycle = count, recycle
        self._supervisor: Supervisor | None = None
        self._problem: Problem | None = None
        """Why workers cannot be set up for the current feed; None if they can."""
        self._answers: list[tuple[Task, Answer]] = []

    def _answer(self, feed: Feed) -> None:
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

    def _end(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close(_CLOSE_SECONDS)
            self._supervisor = None

    def _go_on(self, feed: Feed, supervisor: Supervisor, crew: Crew) -> None:
        """Send waiting batches to idle workers, and pass on the answers that arrive within _POLL_SECONDS."""
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
        """Read the messages that arrive within ``seconds``. If a worker cannot be set up, store the problem for the
        feed's batches. Raises RewardError if no worker was ever set up."""
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
        """Start workers for ``wanted`` batches, up to the configured count; idle workers are not ended."""
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


class ThreadExecutor(Executor):
    """Runs a quick reward on a thread of the main process. A call that misses its deadline is reported as late, but
    cannot be stopped."""

    def __init__(self, call: Call, target: Any):
        super().__init__()
        self._call, self._target = call, target
        self._requests: queue.SimpleQueue[tuple[RewardBatch, float, Future[Answer]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: Future[Answer] | None = None

    def _answer(self, feed: Feed) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"reward {self._call.name}", daemon=True)
            self._thread.start()
        while not feed.over:
            if (task := feed.take()) is None:
                feed.wait(None)
            else:
                feed.answer(task, self._ask(task, feed))

    def _end(self) -> None:
        if self._thread is not None and (self._overdue is None or self._overdue.done()):
            self._requests.put(None)
            self._thread.join(timeout=_CLOSE_SECONDS)

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
        except (Exception, SystemExit) as error:  # user code can raise anything
            raise RewardError(
                f"reward {self._call.name} could not be set up: {type(error).__name__}: {error}\n"
                f"{traceback.format_exc()}".rstrip()
            ) from error
