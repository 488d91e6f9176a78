"""Where a reward runs: in processes of its own, or on a thread of the main process. Both answer within a deadline.

where.run([Batch, Batch, ...], seconds) -> [Answer, Answer, ...]       # an answer for each, whatever happens
where.close()
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
from tpu_grpo.rewards.answers import Answer, Batch, Call, Problem, failed
from tpu_grpo.rewards.calling import Caller
from tpu_grpo.rewards.processes import Job, Ready, Unready, WorkerProcess

START_SECONDS = 120.0
"""How long a worker may take to import and set up its reward, outside any batch's deadline."""
_LOOK_SECONDS = 0.1
"""How often to look whether a silent worker is still alive."""


class Place(Protocol):
    """Where a reward runs."""

    def run(self, batches: Sequence[Batch], seconds: float) -> list[Answer]:
        """Answers to all batches, within ``seconds`` for all of them together."""
        ...

    def close(self) -> None:
        """Let the reward close, and end what was started."""
        ...


class Processes:
    """``count`` worker processes of one reward; started when first needed, replaced when they die, hang or get old."""

    def __init__(self, job: Job, count: int, recycle: int):
        self._job = job
        self._count = count
        self._recycle = recycle
        self._directory = Path.cwd()
        self._workers: list[WorkerProcess] = []
        self._proven = False
        self._broken: Problem | None = None
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def run(self, batches: Sequence[Batch], seconds: float) -> list[Answer]:
        """Answers to all batches. A batch whose worker dies is not tried again.

        Raises:
            RewardError: if the reward never could be set up.
        """
        self._broken = None
        self._fill(len(batches))
        self._await_start()
        answers: dict[int, Answer] = {}
        waiting = deque(range(len(batches)))
        deadline = time.monotonic() + seconds
        while len(answers) < len(batches) and (left := deadline - time.monotonic()) > 0 and not self._broken:
            self._hand_out(waiting, batches, left)
            for worker in self._heard_from(min(left, _LOOK_SECONDS)):
                self._take(worker, batches, answers)
            self._fill(len(batches) - len(answers))
        late = self._broken or Problem("late", "did not answer")
        self._end_busy()
        self._replace_old()
        self._fill(len(batches))
        return [answers.get(i) or failed(batch.size, late) for i, batch in enumerate(batches)]

    def close(self) -> None:
        """Stop all workers."""
        for worker in self._workers:
            worker.dismiss()
        while self._workers:
            self._workers.pop().stop()
        self._finalizer.detach()

    def _fill(self, wanted: int) -> None:
        while len(self._workers) < min(self._count, wanted) and not self._broken:
            self._workers.append(WorkerProcess(self._job, self._directory))

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while starting := [w for w in self._workers if not w.ready]:
            if time.monotonic() > deadline:
                for worker in starting:
                    self._drop(worker)
                self._give_up(f"could not be set up in {START_SECONDS:.0f} s")
                return
            for worker in self._heard_from(_LOOK_SECONDS):
                self._take(worker, (), {})
            if self._broken:
                return

    def _hand_out(self, waiting: deque[int], batches: Sequence[Batch], seconds: float) -> None:
        for worker in self._workers:
            if waiting and worker.ready and worker.task is None:
                worker.task = waiting.popleft()
                worker.calls += 1
                with contextlib.suppress(OSError):  # it died in idleness: noticed, and named, when it is heard
                    worker.send((batches[worker.task], seconds))

    def _heard_from(self, seconds: float) -> list[WorkerProcess]:
        """Workers that have said something or have ended."""
        speaking = wait([w.connection for w in self._workers], timeout=seconds)
        return [w for w in self._workers if w.connection in speaking] or [w for w in self._workers if w.ended]

    def _take(self, worker: WorkerProcess, batches: Sequence[Batch], answers: dict[int, Answer]) -> None:
        """Hear what a worker has to say, or that it is gone."""
        try:
            message = worker.receive() if worker.connection.poll() else None
        except (EOFError, OSError, pickle.UnpicklingError):
            message = None
        match message:
            case Ready():
                worker.ready = self._proven = True
            case Unready(text, trace):
                self._drop(worker)
                self._give_up(f"could not be set up in its worker: {text}", trace)
            case Answer():
                assert worker.task is not None
                answers[worker.task] = message
                worker.task = None
            case _:
                task, ready = worker.task, worker.ready
                ending = self._drop(worker)
                if not ready:
                    self._give_up(f"could not be set up: its worker, which {ending}, said nothing")
                elif task is not None:
                    answers[task] = failed(batches[task].size, Problem("died", f"lost its worker, which {ending}"))

    def _drop(self, worker: WorkerProcess) -> str:
        self._workers.remove(worker)
        return worker.kill()

    def _give_up(self, text: str, trace: str = "") -> None:
        """Start no more workers in this run; if there never was one that worked, there is no use in going on at all."""
        self._broken = Problem("died", text, trace=trace)
        if not self._proven:
            raise RewardError(f"reward {self._job.call.name} {text}\n{trace}".rstrip())

    def _end_busy(self) -> None:
        for worker in [w for w in self._workers if w.task is not None]:
            self._drop(worker)

    def _replace_old(self) -> None:
        for worker in [w for w in self._workers if w.calls >= self._recycle]:
            self._workers.remove(worker)
            worker.stop()


def _kill_all(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()


class Thread:
    """A thread of the main process, for what is cheap: a deadline is kept by going on without the answer."""

    def __init__(self, call: Call, target: Any):
        self._call = call
        self._target = target
        self._asked: queue.SimpleQueue[tuple[Batch, float, Future[Answer]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: Future[Answer] | None = None

    def run(self, batches: Sequence[Batch], seconds: float) -> list[Answer]:
        """Answers to all batches.

        Raises:
            RewardError: if the reward could not be set up.
            KeyboardInterrupt: if that is what the reward raised.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"reward {self._call.name}", daemon=True)
            self._thread.start()
        if self._overdue is not None and not self._overdue.done():
            still = Problem("late", "still works on an earlier batch; give it a worker process, which can be ended")
            return [failed(batch.size, still) for batch in batches]
        deadline = time.monotonic() + seconds
        return [self._ask(batch, max(0.0, deadline - time.monotonic())) for batch in batches]

    def close(self) -> None:
        """Let the reward close, for a moment."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(timeout=5.0)

    def _ask(self, batch: Batch, seconds: float) -> Answer:
        future: Future[Answer] = Future()
        self._asked.put((batch, seconds, future))
        try:
            return future.result(timeout=seconds)
        except FutureTimeout:
            self._overdue = future
            return failed(batch.size, Problem("late", "did not answer"))

    def _serve(self) -> None:
        caller: Caller | None = None
        while (asked := self._asked.get()) is not None:
            batch, seconds, future = asked
            try:
                caller = caller or self._set_up()
                future.set_result(caller.answer(batch, max(0.0, seconds - min(0.5, 0.1 * seconds))))
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
