"""Says how a run ended, and ends this process from a thread that is not the main one, with one message.

The main thread may be inside a collective that never returns, where no exception can reach it. ``os._exit`` ends it
nevertheless; it also skips jax's own shutdown, which would wait for hosts that are gone, and does not wait for threads.

Nothing here may raise or wait for long: nobody may read this process' output any more, the pipe that it writes to may
be full, and the disk of its log may be full, gone or hanging.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from tpu_grpo.records.errors import Interrupted, LockstepError, TpuGrpoError, disk_error

Outcome = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class End:
    """Says how a run ended, to people who were not there."""

    outcome: Outcome
    """``stopped``: it was asked to."""
    code: int
    """The exit code of the process."""
    message: str = ""
    """What the run said last; empty where there is nothing to say."""

    @classmethod
    def by(cls, error: BaseException | None) -> "End":
        """Say what an error made of a run; None is no error."""
        match error:
            case None:
                return cls("done", 0)
            case Interrupted():
                return cls("stopped", error.exit_code, str(error))
            case KeyboardInterrupt():
                return cls("stopped", 1, "the run was interrupted at once; its newest checkpoint stays where it is")
            case OSError() if (explained := disk_error(error)) is not None:
                return cls("failed", explained.exit_code, f"{type(explained).__name__}: {explained}")
            case _:
                code = error.exit_code if isinstance(error, TpuGrpoError) else 1
                return cls("failed", code, f"{type(error).__name__}: {error}")


class Here:
    """Holds what a last message says about this process: set by whoever knows, read at the end."""

    index: int = 0
    stage: str = "start-up"
    log: Path | None = None
    """This is the host's log file, once it has one."""
    leaving_with: int | None = None
    """A process that is already ending because of an error of its own, which it prints itself, has this exit code."""
    cause: str | None = None
    """Why all hosts end, once another host has told; what is noticed afterwards, such as its end, follows from it."""
    step: int | None = None
    """How many steps of the run are done; None before its directory is its own."""

    def __init__(self) -> None:
        self.at_end: dict[str, Callable[[End], None]] = {}
        """Who is told how this process ends, if another thread than the main one ends it; by a name for each."""


here = Here()
alone = threading.Event()
"""Set once no other host can be told anything, because the coordination service is gone."""
_ending = threading.Lock()
LEAVING_SECONDS = 15.0
"""The main thread has so long to print its own error, to tell people, and end."""
WRITING_SECONDS = 1.0
"""Each place that is written to at the end has so long to take it."""
TELLING_SECONDS = 12.0
"""The report is written, and people are told, within so long."""


def end_process(message: str, code: int = LockstepError.exit_code) -> NoReturn:
    """Print ``message`` and what this process was doing to stderr, and end it at once. The first call wins."""
    with _ending:  # never released: a second thread waits here for the end
        if here.leaving_with is not None:  # the main thread is printing its own error, and ends by itself
            time.sleep(LEAVING_SECONDS)
            os._exit(here.leaving_with)
        line, code = f"LockstepError: {here.cause or message}", LockstepError.exit_code if here.cause else code
        _say_last(line)
        _tell(End("failed", code, line), TELLING_SECONDS)
        _exit(code)


def end_after(
    line: str,
    code: int,
    tell_others: Callable[[], None],
    *,
    outcome: Outcome = "failed",
    seconds: float | None = None,
) -> NoReturn:
    """Print an error that another thread than the main one has met, tell the other hosts, and end this process.

    It is printed first, because the end of host 0 may end this process within a moment.

    Args:
        line: what is printed.
        code: the exit code.
        tell_others: tells the other hosts.
        outcome: what it makes of the run.
        seconds: how long writing the report and telling people may take; ``TELLING_SECONDS`` when None.
    """
    with _ending:
        if here.leaving_with is None:
            here.leaving_with = code
            _say_last(line)
            tell_others()
            _tell(End(outcome, code, line), TELLING_SECONDS if seconds is None else seconds)
            _exit(code)
        time.sleep(LEAVING_SECONDS)  # the main thread is printing its own error
        os._exit(here.leaving_with)


def leave_when_done() -> None:
    """End this process with ``here.leaving_with`` once its main thread is done, and at the latest some seconds later.

    Threads that wait for other hosts, such as those that save a checkpoint, are left behind: Python would await them
    before it calls what ``atexit`` has registered.
    """

    def leave() -> None:
        threading.main_thread().join(LEAVING_SECONDS)
        _exit(here.leaving_with or 1)

    atexit.register(lambda: _exit(here.leaving_with or 1))  # before jax's own, which would wait for the others
    threading.Thread(target=leave, daemon=True).start()


def _tell(end: End, seconds: float) -> None:
    """Tell everyone who wants to know, one after the other, however much of it the time allows."""

    def tell() -> None:
        for call in list(here.at_end.values()):
            _quietly(lambda call=call: call(end))

    if here.at_end:
        in_time([tell], seconds)


def _say_last(line: str) -> None:
    """Write a line with this host and its stage to stderr and to the host's log, wherever it can be written in time."""
    whole = f"{line} (seen by host {here.index}, in stage {here.stage})\n".encode()
    # Not through sys.stderr or the logging module, whose locks the main thread may hold.
    writes: list[Callable[[], object]] = [lambda: os.write(2, whole)]
    if (log := here.log) is not None:
        writes.append(lambda: _append(log, whole))
    in_time(writes)


def _exit(code: int) -> NoReturn:
    in_time([logging.shutdown, sys.stdout.flush, sys.stderr.flush])
    os._exit(code)


def _append(path: Path, line: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def in_time(calls: Sequence[Callable[[], object]], seconds: float = WRITING_SECONDS) -> None:
    """Make calls that write and may fail or never return: each on a thread of its own, all awaited for so long."""
    threads: list[threading.Thread] = []
    for call in calls:
        thread = threading.Thread(target=_quietly, args=[call], daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python starts no thread while it shuts down
            _quietly(call)
        else:
            threads.append(thread)
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _quietly(call: Callable[[], object]) -> None:
    with suppress(OSError, ValueError):  # a stream that is closed raises ValueError
        call()


def host_names(indices: Sequence[int]) -> str:
    """Name hosts in messages: "host 1" or "hosts 0, 2, 3"."""
    return f"host {indices[0]}" if len(indices) == 1 else f"hosts {', '.join(map(str, indices))}"
