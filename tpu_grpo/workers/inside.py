"""What fork servers and workers do to their own process: its end, its output, its limits, its children."""

import atexit
import contextlib
import ctypes
import fcntl
import multiprocessing.process
import multiprocessing.util
import os
import resource
import signal
import sys
import weakref
from pathlib import Path
from typing import NoReturn

import psutil

from tpu_grpo.workers.streams import lasting

_libc = ctypes.CDLL(None, use_errno=True)
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of Linux's prctl.h."""
_ENOUGH_FILES = 2**16


def end_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process's whole group once the other end of the pipe ``lifeline`` closes.

    A thread could not do it: code that hangs without giving up the interpreter lock would keep it from running. The
    signal is SIGKILL, which nobody can block or ignore.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def outlive_parent(lifeline: int) -> None:
    """Undo ``end_with_parent``, for a process that ends by itself and has something to tidy up before."""
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) & ~os.O_ASYNC)


def print_by_line() -> None:
    """Have each line that this process prints go out at once, and be dropped when nobody reads any more.

    A buffer would be lost with a process that is killed, and would go along into each that is forked.
    """
    sys.stdout, sys.stderr = (lasting(stream) for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a StringIO, where there is nothing to write to
            stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]


def flush_output() -> None:
    """Write what users' code has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # users' code has replaced or closed it
            stream.flush()


def leave(code: int) -> NoReturn:
    """End this process at once, but for what is registered to be done at its end, such as removing files.

    The interpreter's own end takes longer, and does not come at all while a thread or a task refuses to end.
    """
    try:
        atexit._run_exitfuncs()
        flush_output()
    finally:
        os._exit(code)


def start_afresh() -> None:
    """Have nothing done at the end of this forked process that was registered before, which the parent does at its own.

    What this process itself registers from now on is done: with ``atexit``, ``weakref.finalize`` (a
    ``TemporaryDirectory`` does) and ``multiprocessing``, whose own registry knows who registered what.
    """
    atexit._clear()
    for finalizer in weakref.finalize._registry:  # pyright: ignore[reportAttributeAccessIssue]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # pyright: ignore[reportAttributeAccessIssue]
    multiprocessing.process._children.clear()  # pyright: ignore[reportAttributeAccessIssue]
    atexit.register(multiprocessing.util._exit_function)  # pyright: ignore[reportAttributeAccessIssue]


def limit_memory(memory_bytes: int) -> None:
    """Let this process and each of those it starts allocate so many bytes, and write no core files."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_many_files() -> int:
    """Raise this process's limit on open files as far as it may and has use for, and return what it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _ENOUGH_FILES)), hard))
    return soft


def allow_files(soft: int) -> None:
    """Set this process's limit on open files, up to what it may raise it to."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the process ``parent``, which forked it, dies."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent dies, so that none can get away."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the numbers of the processes whose parent this one is."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    if path.exists():
        return [int(number) for number in path.read_text().split()]
    return [process.pid for process in psutil.Process().children()]  # a kernel without CONFIG_PROC_CHILDREN


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
