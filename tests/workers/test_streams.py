"""Streams whose reader goes away."""

from tpu_grpo.workers.streams import LastingStream


def test_a_stream_that_fails_is_dropped() -> None:
    class Broken:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

        def fileno(self) -> int:
            raise OSError

    stream = LastingStream(Broken())  # pyright: ignore[reportArgumentType]
    assert stream.write("four") == 4
    stream.flush()
