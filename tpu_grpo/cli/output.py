"""Lets a command go on after the readers of its output are gone.

A run outlives the terminal, pipe or ssh connection in which it was started: it goes on when its output is closed.
Characters that the output's encoding lacks are written as escapes. The streams are in ``workers/streams.py``.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tpu_grpo.workers.streams import lasting


@contextmanager
def lasting_output() -> Iterator[None]:
    """Ignore a closed stdout or stderr in this block."""
    _occupy_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (lasting(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # errors are handled here; the interpreter's own flush would change the exit code
        sys.stdout, sys.stderr = before


def _occupy_descriptors() -> None:
    """Open closed standard descriptors; otherwise a file of the run could get number 1 or 2, and printed text."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
