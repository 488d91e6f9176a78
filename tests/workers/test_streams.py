"""Streams whose reader goes away, and what users' code prints."""

import io
import os

from tpu_grpo.workers.streams import LONGEST_SHOWN, LastingStream, copy_lines


def test_what_users_code_prints_is_cut_and_controls_no_terminal() -> None:
    """A title is set, a line is long, a progress bar is written anew, bytes are no UTF-8."""
    lines = [b"\x1b]0;mine\x07title", b"x" * 30_000_000, b"10 %\r100 %", b"dos\r", b"\xff\xc3\xa9", b"", b"cut off"]
    reading, writing = os.pipe()
    copy_lines(writing, io.BufferedReader(io.BytesIO(b"\n".join(lines))))
    os.close(writing)
    with os.fdopen(reading) as shown:
        assert shown.read().splitlines() == [
            "\\x1b]0;mine\\x07title",
            "x" * LONGEST_SHOWN + " ... (30,000,001 bytes)",
            "100 %",
            "dos",
            "\\xffé",
            "",
            "cut off",
        ]


def test_a_stream_that_fails_is_dropped() -> None:
    class Broken:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

        def fileno(self) -> int:
            raise OSError

    stream = LastingStream(Broken())  # pyrefly: ignore[bad-argument-type]
    assert stream.write("four") == 4
    stream.flush()
