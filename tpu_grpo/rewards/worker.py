"""Both ends of a worker process are here: WorkerProcess holds it in the main process, ``main`` is its program.

    main process                                worker
    WorkerProcess(job, directory)    starts     main()
    send(job)                         ->        sets the reward up
                                      <-        Ready() or SetupFailed(text, trace)
    send((RewardBatch, seconds))      ->        asks the reward
                                      <-        Answer(...)
    send(None)                        ->        closes the reward and ends

A worker is started without jax's and the accelerator's environment, and ended with everything it started. It leads a
session of its own and holds one end of a pipe, the lifeline. When the other end closes, because the main process closed
it or died, the kernel ends the worker's process group, whatever it is doing. What leaves the group is found by a mark
in its environment.
"""

import contextlib
import fcntl
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.batches import Call
from tpu_grpo.rewards.calling import Caller
from tpu_grpo.rewards.feed import Task
from tpu_grpo.rewards.loading import find_reward

WORKER_MARK = "TPU_GRPO_REWARD_WORKER"
"""This environment variable holds a worker's mark; everything that the worker starts inherits it."""
_ACCELERATOR = ("JAX_", "XLA_", "LIBTPU", "TPU_", "PJRT_")
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


class WorkerProcess:
    """A WorkerProcess is a worker as the main process sees it; the top of this file shows what is sent and received."""

    def __init__(self, job: WorkerJob, directory: Path):
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self._mark = secrets.token_hex(8)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                env=_environment(self._mark),
                cwd=directory,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
            )
        os.close(lifeline)
        self.connection = Connection(ours.detach())
        self.connection.send(job)
        self.ready = False
        self._told_to_close = False
        self.task: Task | None = None
        """The worker works on this task, or on none."""
        self.calls = 0.0

    @property
    def ended(self) -> bool:
        """Return whether the process is gone; it is not reaped, so that its number stays its own until ``kill``."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

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
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_SECONDS)
        self.kill()

    def kill(self) -> str:
        """End the process and what it started; return how it ended, in words."""
        if self._process.returncode is None and not self.ended:
            _kill_group(self._process.pid)
        self.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        code = self._process.wait()
        _kill_marked(self._mark)
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _environment(mark: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_ACCELERATOR)}
    search = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": search, WORKER_MARK: mark}


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill_marked(mark: str) -> None:
    """Kill every process that inherited a worker's mark, also those that left its session."""
    while found := [p for p in psutil.process_iter() if _has_mark(p, mark)]:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(WORKER_MARK) == mark
    except (psutil.Error, OSError):  # gone meanwhile, or somebody else's
        return False


# --- in the worker ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve on the connection whose descriptor is the first argument; the second is the lifeline's."""
    connection = Connection(int(sys.argv[1]))
    _end_with_parent(int(sys.argv[2]))
    job: WorkerJob = connection.recv()
    resource.setrlimit(resource.RLIMIT_DATA, (job.memory_bytes, job.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel send SIGIO, which ends a process, to the whole group once the pipe's other end closes.

    A thread could not do it: code that hangs without giving up the interpreter lock would keep it from running.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
