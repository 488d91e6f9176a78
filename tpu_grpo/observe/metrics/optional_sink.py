"""Lets a run go on when a sink fails that it can do without."""

from collections.abc import Callable, Mapping, Sequence

from tpu_grpo.observe.metrics.sinks import SampleRow, Sink
from tpu_grpo.observe.metrics.values import MetricValue


class OptionalSink:
    """Passes everything on to a sink until that fails: then it says so in one line, and drops the sink.

    A library's own error, whatever its type, neither ends the run nor reaches the other sinks.

    Args:
        name: what the sink is called in the line.
        remedy: what the line advises.
        open_sink: makes the sink; may fail, too.
        say: shows a line to whoever watches.
    """

    def __init__(self, name: str, remedy: str, open_sink: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self._name, self._remedy, self._say = name, remedy, say
        self._sink: Sink | None = None
        self._try("starting", lambda: self._open(open_sink))

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Pass one step on."""
        if (sink := self._sink) is not None:
            self._try("logging", lambda: sink.write(metrics))

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Pass the rows of a step on."""
        if (sink := self._sink) is not None:
            self._try("logging samples", lambda: sink.samples(step, rows))

    def close(self) -> None:
        """Finish the sink, unless it has failed."""
        if (sink := self._sink) is not None:
            self._try("finishing", sink.close)

    def _open(self, open_sink: Callable[[], Sink]) -> None:
        self._sink = open_sink()

    def _try(self, doing: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._sink = None
            self._say(
                f"{self._name} failed while {doing} ({type(error).__name__}: {error}); the run goes on without it, and "
                f"its own files are complete. {self._remedy}"
            )
