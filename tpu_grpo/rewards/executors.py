"""An executor runs a reward: in worker processes of its own, or on a thread of the main process.

executor.serve(feed)                               # answers what the feed brings, until it is over
answers = run(executor, [batch, ...], seconds)     # one Answer per batch within the deadline, whatever happens
executor.close()
"""

import contextlib
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards.calling import Answer, Call, Caller, Problem, RewardBatch, failed_answer
from tpu_grpo.rewards.feed import Feed, Served, Task
from tpu_grpo.rewards.worker import Ready, RewardWorker, SetupFailed, WorkerJob

START_SECONDS = 120.0
"""A worker has this time to import and set up its reward, outside any batch's deadline."""
_LATE = Problem("late", "did not answer")
_POLL_SECONDS = 0.1
"""After this time without a message, the pool looks whether its workers are still alive."""


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


class WorkerPool:
    """A pool has ``count`` worker processes of one reward.

    Workers are started when a feed needs them, and replaced when they die, hang, or have had ``recycle`` calls.
    """

    def __init__(self, job: WorkerJob, count: int, recycle: int):
        self._job = job
        self._count = count
        self._recycle = recycle
        self._directory = Path.cwd()
        self._workers: list[RewardWorker] = []
        self._was_ready = False
        self._setup_problem: Problem | None = None
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        self._served = Served()

    def serve(self, feed: Feed) -> None:
        """Answer what the feed brings. A batch whose worker dies is not tried again.

        Raises:
            RewardError: if the reward never could be set up.
        """
        with self._served(feed):
            self._setup_problem = None
            try:
                self._start_workers(feed.expected)
                self._await_setup(feed)
                while not feed.over:
                    self._advance(feed)
            finally:
                self._kill_busy()
                self._stop_old()
            if not feed.cancelled:
                self._start_workers(feed.expected)

    def close(self) -> None:
        """Stop all workers; one that is at work is ended."""
        self._served.give_up()
        for worker in self._workers:
            worker.request_close()
        while self._workers:
            self._workers.pop().stop()
        self._finalizer.detach()

    def _advance(self, feed: Feed) -> None:
        """Hand out what waits, and take in what comes within a moment."""
        left = feed.deadline - time.monotonic()
        if self._setup_problem or left <= 0:
            self._kill_busy()
            feed.answer_all(self._setup_problem or _LATE)
            feed.wait(0.0 if feed.over else _POLL_SECONDS)
            return
        self._hand_out(feed)
        for worker in self._await_messages(feed, min(left, _POLL_SECONDS)):
            self._handle_message(worker, feed)
        self._end_late(feed)
        self._start_workers(feed.left)

    def _start_workers(self, wanted: int) -> None:
        while len(self._workers) < min(self._count, wanted) and not self._setup_problem:
            self._workers.append(RewardWorker(self._job, self._directory))

    def _await_setup(self, feed: Feed) -> None:
        deadline = time.monotonic() + START_SECONDS
        while (starting := [w for w in self._workers if not w.ready]) and not feed.cancelled:
            if time.monotonic() > deadline:
                for worker in starting:
                    self._kill(worker)
                self._setup_failed(f"could not be set up in {START_SECONDS:.0f} s")
                return
            for worker in self._await_messages(feed, _POLL_SECONDS):
                self._handle_message(worker, feed)
            if self._setup_problem:
                return

    def _hand_out(self, feed: Feed) -> None:
        """Send a task to every idle worker, as long as there are any."""
        idle = [worker for worker in self._workers if worker.ready and worker.task is None]
        for number, worker in enumerate(idle):
            if (task := feed.take(len(idle) - number)) is None:
                return
            worker.task = task
            worker.calls += feed.weight * len(task.keys)
            with contextlib.suppress(OSError):  # it died while idle, which the next _handle_message reports
                worker.send((task.batch, task.until - time.monotonic()))

    def _await_messages(self, feed: Feed, seconds: float) -> list[RewardWorker]:
        """Return the workers that have said something or have ended."""
        speaking = feed.wait(seconds, [w.connection for w in self._workers])
        return [w for w in self._workers if w.connection in speaking] or [w for w in self._workers if w.ended]

    def _handle_message(self, worker: RewardWorker, feed: Feed) -> None:
        """Receive what a worker has to say, or find that it is gone."""
        try:
            message = worker.receive() if worker.connection.poll() else None
        except (EOFError, OSError, pickle.UnpicklingError):
            message = None
        match message:
            case Ready():
                worker.ready = self._was_ready = True
            case SetupFailed(text, trace):
                self._kill(worker)
                self._setup_failed(f"could not be set up in its worker: {text}", trace)
            case Answer():
                assert worker.task is not None
                task, worker.task = worker.task, None
                feed.answer(task, message)
            case _:
                ending = self._kill(worker)
                if not worker.ready:
                    self._setup_failed(f"could not be set up: its worker, which {ending}, said nothing")
                elif worker.task is not None:
                    died = Problem("died", f"lost its worker, which {ending}")
                    feed.answer(worker.task, failed_answer(worker.task.batch.size, died))

    def _end_late(self, feed: Feed) -> None:
        """End the workers that have had their task for too long."""
        now = time.monotonic()
        for worker in [w for w in self._workers if w.task is not None and now > w.task.until]:
            task = worker.task
            assert task is not None
            self._kill(worker)
            feed.answer(task, failed_answer(task.batch.size, _LATE))

    def _kill(self, worker: RewardWorker) -> str:
        """End a worker of the pool; return how it ended, in words."""
        self._workers.remove(worker)
        return worker.kill()

    def _setup_failed(self, text: str, trace: str = "") -> None:
        """Start no more workers for this feed; raise if none ever worked, as going on has no use then."""
        self._setup_problem = Problem("died", text, trace=trace)
        if not self._was_ready:
            raise RewardError(f"reward {self._job.call.name} {text}\n{trace}".rstrip())

    def _kill_busy(self) -> None:
        for worker in [w for w in self._workers if w.task is not None]:
            self._kill(worker)

    def _stop_old(self) -> None:
        for worker in [w for w in self._workers if w.calls >= self._recycle]:
            self._workers.remove(worker)
            worker.stop()


def _kill_all(workers: list[RewardWorker]) -> None:
    for worker in workers:
        worker.kill()


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
