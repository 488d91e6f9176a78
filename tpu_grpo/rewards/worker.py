"""Both ends of a reward's process are here: RewardWorker holds it in the main process, ``main`` is its program.

    main process                                worker
    RewardWorker(job, directory)     starts     main()
    send(job)                         ->        sets the reward up
                                      <-        Ready() or SetupFailed(text, trace)
    send((RewardBatch, seconds))      ->        asks the reward
                                      <-        Answer(...)
    send(None)                        ->        closes the reward and ends

How it is started, and ended with everything it started: ``workers/process.py``.
"""

import contextlib
import os
import socket
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards.calling import Call, Caller
from tpu_grpo.rewards.feed import Task
from tpu_grpo.rewards.loading import find_reward
from tpu_grpo.workers.inside import end_with_parent, limit_memory, print_by_line
from tpu_grpo.workers.process import WorkerProcess

_CLOSE_SECONDS = 5.0
_PROGRAM = "from tpu_grpo.rewards.worker import main; main()"


@dataclass(frozen=True)
class WorkerJob:
    """A WorkerJob tells a worker which reward to call, and how much memory it may take."""

    call: Call
    memory_bytes: int


@dataclass(frozen=True)
class Ready:
    """Ready is a worker's first message: its reward can be asked."""


@dataclass(frozen=True)
class SetupFailed:
    """SetupFailed is a worker's last message: its reward could not be found or set up."""

    text: str
    trace: str


# --- in the main process ---------------------------------------------------------------------------------------------


class RewardWorker:
    """A RewardWorker is a worker as the main process sees it; the top of this file shows what is sent and received."""

    def __init__(self, job: WorkerJob, directory: Path):
        ours, theirs = socket.socketpair()
        self._process = WorkerProcess(_PROGRAM, theirs, directory)
        self.connection = Connection(ours.detach())
        self.connection.send(job)
        self.ready = False
        self._told_to_close = False
        self.task: Task | None = None
        """The worker works on this task, or on none."""
        self.calls = 0.0

    @property
    def ended(self) -> bool:
        """Return whether the process is gone."""
        return self._process.ended

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the worker is gone."""
        self.connection.send(message)

    def receive(self) -> Any:
        """Return the next message. Raises EOFError or OSError if the worker is gone."""
        return self.connection.recv()

    def request_close(self) -> None:
        """Tell the worker to close its reward and to end, if it is idle."""
        if self.ready and self.task is None and not self._told_to_close:
            self._told_to_close = True
            with contextlib.suppress(OSError):
                self.send(None)

    def stop(self) -> None:
        """Tell the worker to close, give it a few seconds, then end it."""
        self.request_close()
        if self._told_to_close:
            self._process.wait(_CLOSE_SECONDS)
        self.kill()

    def kill(self) -> str:
        """End the process and what it started; return how it ended, in words."""
        ending = self._process.kill()
        self.connection.close()
        return ending


# --- in the worker ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve on the connection whose descriptor is the first argument; the second is the lifeline's."""
    connection = Connection(int(sys.argv[1]))
    end_with_parent(int(sys.argv[2]))
    print_by_line()
    job: WorkerJob = connection.recv()
    limit_memory(job.memory_bytes)
    caller = _set_up(job, connection)
    if caller is not None:
        with contextlib.suppress(EOFError, OSError):  # the parent is gone, and so is the reason to be here
            _serve(caller, connection)
        caller.close()


def _set_up(job: WorkerJob, connection: Connection) -> Caller | None:
    try:
        caller = Caller(job.call, find_reward(job.call.source))
    except RewardError as error:
        connection.send(SetupFailed(str(error), ""))
    except (Exception, SystemExit) as error:  # user code: anything can come
        connection.send(SetupFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
    else:
        connection.send(Ready())
        return caller
    return None


def _serve(caller: Caller, connection: Connection) -> None:
    process = os.getpid()
    while (message := connection.recv()) is not None:
        batch, seconds = message
        answer = caller.answer(batch, seconds)
        if os.getpid() != process:
            os._exit(0)  # the reward forked and both returned; the child has nothing to say
        connection.send(answer)
