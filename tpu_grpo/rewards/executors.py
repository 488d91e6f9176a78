"""An executor runs a reward: in worker processes of its own, or on a thread of the main process.

answers = executor.run([batch, ...], seconds)    # one Answer per batch within the deadline, whatever happens
executor.close()
"""

import contextlib
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.batches import Answer, Call, Problem, RewardBatch, failed_answer
from tpu_grpo.rewards.calling import Caller
from tpu_grpo.rewards.worker import Ready, SetupFailed, WorkerJob, WorkerProcess

START_SECONDS = 120.0
"""A worker has this time to import and set up its reward, outside any batch's deadline."""
_POLL_SECONDS = 0.1
"""After this time without a message, the pool looks whether its workers are still alive."""


class Executor(Protocol):
    """An executor runs one reward and keeps its deadlines."""

    def run(self, batches: Sequence[RewardBatch], seconds: float) -> list[Answer]:
        """Return the answers to all batches, within ``seconds`` for all of them together."""
        ...

    def close(self) -> None:
        """Let the reward close, and end what was started."""
        ...


class WorkerPool:
    """A pool has ``count`` worker processes of one reward.

    Workers are started when they are first needed, and replaced when they die, hang, or have had ``recycle`` calls.
    """

    def __init__(self, job: WorkerJob, count: int, recycle: int):
        self._job = job
        self._count = count
        self._recycle = recycle
        self._directory = Path.cwd()
        self._workers: list[WorkerProcess] = []
        self._was_ready = False
        self._setup_problem: Problem | None = None
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def run(self, batches: Sequence[RewardBatch], seconds: float) -> list[Answer]:
        """Return the answers to all batches. A batch whose worker dies is not tried again.

        Raises:
            RewardError: if the reward never could be set up.
        """
        self._setup_problem = None
        self._start_workers(len(batches))
        self._await_setup()
        answers: dict[int, Answer] = {}
        waiting = deque(range(len(batches)))
        deadline = time.monotonic() + seconds
        while len(answers) < len(batches) and (left := deadline - time.monotonic()) > 0 and not self._setup_problem:
            self._hand_out(waiting, batches, left)
            for worker in self._await_messages(min(left, _POLL_SECONDS)):
                self._handle_message(worker, batches, answers)
            self._start_workers(len(batches) - len(answers))
        problem = self._setup_problem or Problem("late", "did not answer")
        self._kill_busy()
        self._stop_old()
        self._start_workers(len(batches))
        return [answers.get(i) or failed_answer(batch.size, problem) for i, batch in enumerate(batches)]

    def close(self) -> None:
        """Stop all workers."""
        for worker in self._workers:
            worker.request_close()
        while self._workers:
            self._workers.pop().stop()
        self._finalizer.detach()

    def _start_workers(self, wanted: int) -> None:
        while len(self._workers) < min(self._count, wanted) and not self._setup_problem:
            self._workers.append(WorkerProcess(self._job, self._directory))

    def _await_setup(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while starting := [w for w in self._workers if not w.ready]:
            if time.monotonic() > deadline:
                for worker in starting:
                    self._kill(worker)
                self._setup_failed(f"could not be set up in {START_SECONDS:.0f} s")
                return
            for worker in self._await_messages(_POLL_SECONDS):
                self._handle_message(worker, (), {})
            if self._setup_problem:
                return

    def _hand_out(self, waiting: deque[int], batches: Sequence[RewardBatch], seconds: float) -> None:
        """Send a waiting batch to every idle worker, as long as there are batches."""
        for worker in self._workers:
            if waiting and worker.ready and worker.batch_index is None:
                worker.batch_index = waiting.popleft()
                worker.calls += 1
                with contextlib.suppress(OSError):  # it died while idle, which the next _handle_message reports
                    worker.send((batches[worker.batch_index], seconds))

    def _await_messages(self, seconds: float) -> list[WorkerProcess]:
        """Return the workers that have said something or have ended."""
        speaking = wait([w.connection for w in self._workers], timeout=seconds)
        return [w for w in self._workers if w.connection in speaking] or [w for w in self._workers if w.ended]

    def _handle_message(
        self, worker: WorkerProcess, batches: Sequence[RewardBatch], answers: dict[int, Answer]
    ) -> None:
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
                assert worker.batch_index is not None
                answers[worker.batch_index] = message
                worker.batch_index = None
            case _:
                index, ready = worker.batch_index, worker.ready
                ending = self._kill(worker)
                if not ready:
                    self._setup_failed(f"could not be set up: its worker, which {ending}, said nothing")
                elif index is not None:
                    died = Problem("died", f"lost its worker, which {ending}")
                    answers[index] = failed_answer(batches[index].size, died)

    def _kill(self, worker: WorkerProcess) -> str:
        """End a worker of the pool; return how it ended, in words."""
        self._workers.remove(worker)
        return worker.kill()

    def _setup_failed(self, text: str, trace: str = "") -> None:
        """Start no more workers in this run; raise if there never was one that worked, as going on has no use then."""
        self._setup_problem = Problem("died", text, trace=trace)
        if not self._was_ready:
            raise RewardError(f"reward {self._job.call.name} {text}\n{trace}".rstrip())

    def _kill_busy(self) -> None:
        for worker in [w for w in self._workers if w.batch_index is not None]:
            self._kill(worker)

    def _stop_old(self) -> None:
        for worker in [w for w in self._workers if w.calls >= self._recycle]:
            self._workers.remove(worker)
            worker.stop()


def _kill_all(workers: list[WorkerProcess]) -> None:
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

    def run(self, batches: Sequence[RewardBatch], seconds: float) -> list[Answer]:
        """Return the answers to all batches.

        Raises:
            RewardError: if the reward could not be set up.
            KeyboardInterrupt: if that is what the reward raised.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"reward {self._call.name}", daemon=True)
            self._thread.start()
        if self._overdue is not None and not self._overdue.done():
            busy = Problem("late", "still works on an earlier batch; give it a worker process, which can be ended")
            return [failed_answer(batch.size, busy) for batch in batches]
        deadline = time.monotonic() + seconds
        return [self._ask(batch, max(0.0, deadline - time.monotonic())) for batch in batches]

    def close(self) -> None:
        """Let the reward close, and wait a moment for it."""
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(timeout=5.0)

    def _ask(self, batch: RewardBatch, seconds: float) -> Answer:
        future: Future[Answer] = Future()
        self._requests.put((batch, seconds, future))
        try:
            return future.result(timeout=seconds)
        except FutureTimeout:
            self._overdue = future
            return failed_answer(batch.size, Problem("late", "did not answer"))

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
