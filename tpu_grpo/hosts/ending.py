"""Ends this process from a thread that is not the main one, with one message.

The main thread may be inside a collective that never returns, where no exception can reach it. ``os._exit`` ends it
nevertheless; it also skips jax's own shutdown, which would wait for hosts that are gone.
"""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tpu_grpo.errors import LockstepError


class Here:
    """Holds what a last message says about this process: set by whoever knows, read at the end."""

    index: int = 0
    stage: str = "start-up"
    log: Path | None = None
    """This is the host's log file, once it has one."""
    leaving_with: int | None = None
    """A process that is already ending because of an error of its own, which it prints itself, has this exit code."""


here = Here()
_ending = threading.Lock()
LEAVING_SECONDS = 10.0
"""The main thread has so long to print its own error and end."""
FLUSH_SECONDS = 1.0


def end_process(message: str, code: int = LockstepError.exit_code) -> NoReturn:
    """Print ``message`` and what this process was doing to stderr, and end it at once. The first call wins."""
    with _ending:  # never released: a second thread waits here for the end
        if here.leaving_with is not None:  # the main thread is printing its own error, and ends by itself
            threading.Event().wait(LEAVING_SECONDS)
            os._exit(here.leaving_with)
        line = f"LockstepError: {message} (seen by host {here.index}, in stage {here.stage})\n"
        os.write(2, line.encode())  # not through sys.stderr, whose lock the main thread may hold
        if here.log is not None:
            _append(here.log, line)
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        os._exit(code)


def _append(path: Path, line: str) -> None:
    """Write without the logging module, whose locks the main thread may hold."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
    except OSError:  # the disk is gone too; stderr has the line
        return
    os.write(file, line.encode())
    os.close(file)


def host_names(indices: Sequence[int]) -> str:
    """Name hosts in messages: "host 1" or "hosts 0, 2, 3"."""
    return f"host {indices[0]}" if len(indices) == 1 else f"hosts {', '.join(map(str, indices))}"
