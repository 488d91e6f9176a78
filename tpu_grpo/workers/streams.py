"""Streams that ignore a closed output, for the main process and for processes of users' code.

A run outlives the terminal, pipe or ssh connection in which it was started: it goes on when its output is closed.
Characters that the output's encoding lacks are written as escapes.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


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
    """Return a stream that writes to ``stream`` until that fails, then drops text; it escapes unencodable
    characters."""
    if stream is None:  # it was closed before the start
        return io.StringIO()
    with suppress(AttributeError, ValueError):  # a stream of a test or a notebook, which has no encoding
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    return stream if isinstance(stream, LastingStream) else cast("TextIO", LastingStream(stream))


class LastingStream(io.TextIOBase):
    """Writes to a stream; after an error, drops all text.

    The stream's file descriptor is then redirected to /dev/null, so that other code that writes to it does not fail.
    """

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

    def writable(self) -> bool:
        """Return True: the stream can always be written to."""
        return True

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the encoding of the stream, by which rich chooses its characters."""
        return self._stream.encoding

    def _lose(self) -> None:
        with suppress(OSError, ValueError):  # without a descriptor there is nothing to redirect
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
