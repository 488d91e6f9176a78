"""Lets a command outlive the readers of its output.

A run outlives the terminal, pipe or ssh connection that it was started in: when its output is closed, it goes on.
Characters that the output's encoding lacks are written as escapes. The streams are in ``streams.py``.
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
            stream.flush()  # here, where an error is met; the interpreter's own flush would change the exit code
        sys.stdout, sys.stderr = before


def _occupy_descriptors() -> None:
    """Open what was closed before the start: else a file of the run would get its number, and what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
