"""One worker process as the main process holds it: started without jax's and the accelerator's environment, ended with
everything it started.

A worker leads a session of its own and holds one end of a pipe. When the other end closes, because the main process
closed it or died, the kernel ends the worker's process group, whatever it is doing. What leaves the group is found by
a mark in its environment.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tpu_grpo.rewards.answers import Call

_MARK = "TPU_GRPO_REWARD_WORKER"
_ACCELERATOR = ("JAX_", "XLA_", "LIBTPU", "TPU_", "PJRT_")
_GRACE_SECONDS = 5.0
_MAIN = "from tpu_grpo.rewards.worker import main; main()"


@dataclass(frozen=True)
class Job:
    """What a worker is there for."""

    call: Call
    memory_bytes: int


@dataclass(frozen=True)
class Ready:
    """A worker's first word: it can be asked."""


@dataclass(frozen=True)
class Unready:
    """A worker's last word: the reward could not be found or set up."""

    text: str
    trace: str


class WorkerProcess:
    """A worker: ``send`` it a (Batch, seconds), ``receive`` Ready or Unready first, then an Answer for each."""

    def __init__(self, job: Job, directory: Path):
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self._mark = secrets.token_hex(8)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(lifeline)],
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
        self._dismissed = False
        self.task: int | None = None
        """Which of the batches it works on."""
        self.calls = 0

    @property
    def ended(self) -> bool:
        """Whether the process is gone; it is not reaped, so that its number stays its own until ``kill``."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def send(self, message: Any) -> None:
        """Raises OSError if the worker is gone."""
        self.connection.send(message)

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError if the worker is gone."""
        return self.connection.recv()

    def dismiss(self) -> None:
        """Tell it to close its reward, if it is idle."""
        if self.ready and self.task is None and not self._dismissed:
            self._dismissed = True
            with contextlib.suppress(OSError):
                self.send(None)

    def stop(self) -> None:
        """Dismiss it, give it a few seconds, then end it."""
        self.dismiss()
        if self._dismissed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)
        self.kill()

    def kill(self) -> str:
        """End the process and what it started; returns how it ended, in words."""
        if self._process.returncode is None and not self.ended:
            _signal_group(self._process.pid)
        self.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        code = self._process.wait()
        _sweep(self._mark)
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _environment(mark: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_ACCELERATOR)}
    search = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": search, _MARK: mark}


def _signal_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _sweep(mark: str) -> None:
    """Kill every process that inherited a worker's mark, also those that left its session."""
    while found := [p for p in psutil.process_iter() if _carries(p, mark)]:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except (psutil.Error, OSError):  # gone meanwhile, or somebody else's
        return False
