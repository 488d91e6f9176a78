"""Streams that ignore a closed output, and what processes of users' code print.

A run outlives the terminal, pipe or ssh connection in which it was started: it goes on when its output is closed.
Characters that the output's encoding lacks are written as escapes. What processes of users' code print may be what a
policy wrote: escape sequences that control the terminal, or endless lines.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO, cast

from tpu_grpo.records.errors import without_controls

LONGEST_SHOWN = 10_000
"""The most bytes of a line that are copied of what users' code prints."""


@contextmanager
def lasting_output() -> Iterator[None]:
    """Ignore a closed stdout or stderr in this block, so that a command continues after its terminal is closed."""
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
    """Open /dev/null for each closed standard descriptor. Otherwise a file of the run could get descriptor 1 or 2, and
    printed text would go into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor


def lasting(stream: TextIO | None) -> TextIO:
    """Return a stream that writes to ``stream`` until that fails, then drops text; it escapes what has no code."""
    if stream is None:  # it was closed before the start
        return io.StringIO()
    with suppress(AttributeError, ValueError):  # a stream of a test or a notebook, which has no encoding
        stream.reconfigure(errors="backslashreplace")  # pyrefly: ignore[missing-attribute]
    return stream if isinstance(stream, LastingStream) else cast("TextIO", LastingStream(stream))


class LastingStream:
    """Writes to a stream; after an error, drops all text, and redirects the stream's descriptor to /dev/null, so that
    other code that writes to it does not fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what was not written."""
        try:
            self._stream.flush()
        except OSError:
            self._lose()
        except ValueError:  # it was closed by the program
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self) -> None:
        with suppress(OSError, ValueError):  # without a descriptor there is nothing to redirect
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def copy_lines(target: int, source: IO[bytes]) -> None:
    """Copy lines to a file descriptor until the source ends: cut after LONGEST_SHOWN bytes, with control characters
    escaped. Of a line that is written anew after carriage returns, as progress bars do, the last state is copied."""
    with source:
        while part := source.readline(LONGEST_SHOWN):
            line, size = part.rstrip(b"\r\n").rpartition(b"\r")[2], len(part)
            while len(part) == LONGEST_SHOWN and not part.endswith(b"\n"):
                size += len(part := source.readline(LONGEST_SHOWN))
            cut = f" ... ({size:,} bytes)" if size > LONGEST_SHOWN else ""
            shown = without_controls(line.decode(errors="backslashreplace")) + cut
            with suppress(OSError):  # nobody reads it any more
                os.write(target, f"{shown}\n".encode())
