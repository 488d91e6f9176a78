"""Makes what a command prints survive whoever reads it.

A run lasts longer than the terminal, the pipe or the ssh connection it was started in: when nobody reads any more, the
command goes on. What the reader's encoding cannot show is written as escapes.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let stdout and stderr lose their readers in this block without an error."""
    _occupy_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_lasting(stream) for stream in before)
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


def _lasting(stream: TextIO | None) -> TextIO:
    if stream is None:  # it was closed before the start
        return io.StringIO()
    with suppress(AttributeError, ValueError):  # a stream of a test or a notebook, which shows everything
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    return stream if isinstance(stream, LastingStream) else cast("TextIO", LastingStream(stream))


class LastingStream(io.TextIOBase):
    """Writes to a stream; once that fails, to nowhere.

    Its file descriptor then leads nowhere, too, so that others who write there do not fail either.
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

    def isatty(self) -> bool:
        """Say whether a person reads it."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the encoding of the stream, by which rich chooses its characters."""
        return self._stream.encoding

    def _lose(self) -> None:
        with suppress(OSError, ValueError):  # without a descriptor there is nothing to lead elsewhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
