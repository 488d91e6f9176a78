"""What a fork server or worker sets for its own process: how the process ends, its output, limits and children."""

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

_libc = ctypes.CDLL(None, use_errno=True)
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of Linux's prctl.h."""
_ENOUGH_FILES = 2**16


def end_with_parent(lifeline: int) -> None:
    """Make the kernel kill this process's group when the other end of the pipe ``lifeline`` closes.

    A thread could not do this: code that hangs while it holds the interpreter lock would keep the thread from running.
    The signal is SIGKILL, which no process can block or ignore.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def outlive_parent(lifeline: int) -> None:
    """Undo ``end_with_parent``, for a process that ends by itself after cleaning up."""
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) & ~os.O_ASYNC)


def print_by_line() -> None:
    """Flush every line that this process prints.

    Buffered text would be lost when the process is killed, and copied into each forked process.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # pyrefly: ignore[missing-attribute]


def flush_output() -> None:
    """Flush the text that users' code has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # users' code has replaced or closed it
            stream.flush()


def leave(code: int) -> NoReturn:
    """Run ``atexit`` functions, such as those that remove temporary files, and then end this process immediately.

    The interpreter's own exit takes longer, and hangs while a thread or a task does not end.
    """
    try:
        atexit._run_exitfuncs()
        flush_output()
    finally:
        os._exit(code)


def start_afresh() -> None:
    """Drop the exit functions that a forked process inherits, which the parent runs at its own end.

    Functions that this process registers from now on are run: those of ``atexit``, ``weakref.finalize`` (which
    ``TemporaryDirectory`` uses) and ``multiprocessing``, which records the process that registered each function.
    """
    atexit._clear()
    for finalizer in weakref.finalize._registry:  # pyrefly: ignore[missing-attribute]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False
    multiprocessing.process._children.clear()  # pyrefly: ignore[missing-attribute]
    atexit.register(multiprocessing.util._exit_function)  # pyrefly: ignore[missing-attribute]


def limit_memory(memory_bytes: int) -> None:
    """Limit the memory of this process and of each process that it starts, and disable core files."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_many_files() -> int:
    """Raise this process's limit on open files as far as allowed and useful, and return the previous limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _ENOUGH_FILES)), hard))
    return soft


def allow_files(soft: int) -> None:
    """Set this process's limit on open files, at most to its hard limit."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def die_with(parent: int) -> None:
    """Make the kernel kill this process when the process ``parent``, which forked it, dies."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that this process can end the descendant."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the ids of this process's children."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    if path.exists():
        return [int(number) for number in path.read_text().split()]
    return [process.pid for process in psutil.Process().children()]  # a kernel without CONFIG_PROC_CHILDREN


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
