"""Starts and kills a process of users' code, from the main process.

The process starts without the environment variables that configure jax or the accelerator, or hold secrets. It is
killed together with all processes that it started. It leads a POSIX session, and holds one end of a pipe, the lifeline.
When the other end closes, because the main process closed it or died, the kernel kills the process's group, whatever
the process is doing. Processes that leave the group are found by a mark in their environment variables.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.secrets import HAS_PASSWORD, LOOKS_SECRET
from tpu_grpo.workers.streams import copy_lines

WORKER_MARK = "TPU_GRPO_WORKER"
"""This environment variable holds a process's mark; everything that the process starts inherits it."""
_STARTING_SECONDS = 5.0
_KERNEL_THREADS = 2
"""The id of the process whose children are the kernel's threads, which have no environment."""
_ACCELERATOR, _OURS = ("JAX_", "XLA_", "LIBTPU", "TPU_", "PJRT_"), "TPU_GRPO_"


class WorkerProcess:
    """A process of users' code. Its program gets as arguments the file descriptors of the process's socket and of the
    lifeline."""

    def __init__(self, program: str, theirs: socket.socket, directory: Path, secrets: Collection[str] = ()):
        """Start Python with the source text ``program``. The socket ``theirs`` is passed to the process and closed
        here. Of the secret environment variables, the process gets only those named in ``secrets``."""
        lifeline, self._lifeline = os.pipe()
        self._mark = os.urandom(8).hex()
        with theirs, open(lifeline, "rb", buffering=0), contextlib.ExitStack() as unless_it_starts:
            unless_it_starts.callback(os.close, self._lifeline)
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(self._mark, secrets),
                cwd=directory,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
            )
            unless_it_starts.pop_all()
        printed = enumerate((self._process.stdout, self._process.stderr), start=1)
        self._copying = [threading.Thread(target=copy_lines, args=each, daemon=True) for each in printed]
        for thread in self._copying:
            thread.start()

    @property
    def ended(self) -> bool:
        """Whether the process has ended; an ended process is not reaped, so its id is not reused before ``kill``."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float) -> None:
        """Wait up to this many seconds for the process to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> str:
        """Kill the process and all that it started; return how it ended, in words."""
        if self._process.returncode is None and not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        code = self._process.wait()
        _kill_marked(self._mark)
        for thread in self._copying:
            thread.join(1.0)
        return how_it_ended(code)


def how_it_ended(code: int) -> str:
    """Describe an exit code in words; a negative code is minus the number of a signal."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def check_secrets(secrets: Collection[str], setting: str) -> None:
    """Check that the environment variables that a setting passes to workers exist. Raises ConfigError otherwise."""
    if missing := [name for name in secrets if name not in os.environ]:
        raise ConfigError(
            f"{setting} must name variables of the environment, got {missing[0]}, which is not there; set it"
        )


def _environment(mark: str, secrets: Collection[str]) -> dict[str, str]:
    def is_seen(name: str, value: str) -> bool:
        is_secret = LOOKS_SECRET.search(name) or HAS_PASSWORD.search(value)
        return not is_secret and (name.startswith(_OURS) or not name.startswith(_ACCELERATOR))

    kept = {name: value for name, value in os.environ.items() if name in secrets or is_seen(name, value)}
    search = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # with a fixed hash seed, sets of texts have the same order in every process, on every host and after a restart
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": search, "PYTHONHASHSEED": "0", WORKER_MARK: mark}


def environment_of(process: psutil.Process) -> Mapping[str, str]:
    """Return the environment variables of a process; empty if it has ended.

    A process that was just started may not have its program's variables yet; then this function waits for them. Raises
    psutil.Error or OSError if the process is gone, or belongs to another user.
    """
    while process.status() != psutil.STATUS_ZOMBIE:
        is_old = time.time() - process.create_time() > _STARTING_SECONDS
        is_in_place = process.cmdline() or is_old or process.ppid() == _KERNEL_THREADS
        if (variables := process.environ()) or is_in_place:
            return variables
        time.sleep(0.001)
    return {}


def _kill_marked(mark: str) -> None:
    """Kill every process with this mark in its environment variables, whatever POSIX session it is in."""
    while found := [p for p in psutil.process_iter() if _has_mark(p, mark)]:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return environment_of(process).get(WORKER_MARK) == mark
    except (psutil.Error, OSError):  # it is gone, or belongs to another user
        return False
