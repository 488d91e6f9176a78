"""The single object through which a run logs its metrics, and the sinks behind it.

with open_run_log(config, start_step=0) as log:          # on host 0; RunLog([]) on the others
    log.step({"step": 1, **rollout_metrics(scored), ...})
    log.samples(1, scored, update.advantages)
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import RunConfig
from tpu_grpo.observe.console import ConsoleSink
from tpu_grpo.observe.json_lines import encode_line, keep_steps
from tpu_grpo.observe.run_files import METRICS_FILE, SAMPLES_FILE
from tpu_grpo.observe.sample_rows import SampleRow, sample_fields, sample_rows
from tpu_grpo.observe.step_metrics import MetricValue
from tpu_grpo.observe.trackers import TensorBoardSink, WandbSink, check_tensorboard
from tpu_grpo.records.stages import ScoredRollout


class Sink(Protocol):
    """Takes the metrics of a run somewhere. One thread calls ``write`` once per step, and ``samples`` at some steps."""

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Take the metrics of one step; they include ``step``."""
        ...

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Take all B rows of a step."""
        ...

    def close(self) -> None:
        """Finish; no call follows."""
        ...


class RunLog:
    """Passes every step on to a list of sinks, in order; with none it does nothing."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def step(self, metrics: Mapping[str, MetricValue]) -> None:
        """Log the metrics of one step, which include ``step``."""
        for sink in self._sinks:
            sink.write(metrics)

    def samples(self, step: int, scored: ScoredRollout, advantages: Float[np.ndarray, " B"]) -> None:
        """Log all B rows of a step."""
        rows = sample_rows(scored, advantages)
        for sink in self._sinks:
            sink.samples(step, rows)

    def note(self, text: str) -> None:
        """Show a line to whoever watches; it is not part of the record."""
        for sink in self._sinks:
            if isinstance(sink, ConsoleSink):
                sink.note(text)

    def close(self) -> None:
        """Close every sink, even if one raises."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_run_log(config: RunConfig, start_step: int, *more: Sink) -> RunLog:
    """Open the sinks that a config asks for. ``start_step`` is the number of steps already done, 0 for a new run.

    ``more`` are sinks of others, which get every step once it is on disk.

    Raises:
        DataError: for metrics or samples of an earlier part of the run that are broken.
        ConfigError: for a library that a setting needs and that is not installed.
    """
    if config.logging.tensorboard:
        check_tensorboard()
    console = ConsoleSink(start_step, config.run.max_steps)
    try:
        files = JsonlSink(config.run_dir, start_step)
        return RunLog([files, console, *more, *_trackers(config, start_step, console.note)])
    except BaseException:
        console.close()  # gives the terminal back
        raise


def _trackers(config: RunConfig, start_step: int, say: Callable[[str], None]) -> Iterator["OptionalSink"]:
    section, run_dir = config.logging, config.run_dir
    if section.tensorboard:
        remedy = "Set logging.tensorboard=false to do without"
        yield OptionalSink("TensorBoard", remedy, lambda: TensorBoardSink(run_dir, start_step), say)
    if (mode := section.wandb) != "off":
        remedy, settings = "Set logging.wandb=offline or off to do without the server", config.model_dump(mode="json")
        yield OptionalSink(
            "wandb",
            remedy,
            lambda: WandbSink(run_dir, config.run.name, section.wandb_project, mode, settings, say),
            say,
        )


class JsonlSink:
    """Writes a line per step and a line per sample; a kill loses at most the line being written.

    ``start_step`` is the number of steps already done, 0 for a new run; steps count from 1. A run that resumes at a
    checkpoint of step s may have logged steps beyond it before it stopped. Those will be done again, so their lines
    are dropped, with a torn last line, and everything up to s is kept:

        on disk: steps 1 2 3 4 5, start_step=3  ->  on disk: 1 2 3; the next line is step 4

    Raises:
        DataError: for a file of an earlier part of the run with a broken line that is not the last.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        def continued(path: Path) -> IO[bytes]:
            keep_steps(path, start_step)
            return path.open("ab")

        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = continued(run_dir / METRICS_FILE)
        self._samples = continued(run_dir / SAMPLES_FILE)

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Append one line; NaN and infinities are written as null."""
        self._metrics.write(encode_line(metrics))
        self._metrics.flush()

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Append one line per row."""
        for row in rows:
            self._samples.write(encode_line({"step": step, **sample_fields(row)}))
            self._samples.flush()

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._samples.close()


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

        def opened() -> None:
            self._sink = open_sink()

        self._try("starting", opened)

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

    def _try(self, doing: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._sink = None
            self._say(
                f"{self._name} failed while {doing} ({type(error).__name__}: {error}); the run goes on without it, and "
                f"its own files are complete. {self._remedy}"
            )
