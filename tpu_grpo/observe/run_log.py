"""The ``RunLog``, through which a run logs metrics and samples, and its sinks: files, the console, trackers.

with open_run_log(run_dir, config.run, config.logging, settings, 0) as log:    # on host 0; RunLog([]) on other hosts
    log.step({"step": 1, **rollout_metrics(scored), ...})
    log.samples(1, scored, update.advantages)
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import LoggingSection, RunSection
from tpu_grpo.observe.callbacks import Callback
from tpu_grpo.observe.console import ConsoleSink
from tpu_grpo.observe.evaluation import Evaluation, EvaluationSamples, sample_records
from tpu_grpo.observe.run_files import METRICS_FILE, SAMPLES_FILE
from tpu_grpo.observe.sample_rows import SampleRow, sample_fields, sample_rows
from tpu_grpo.observe.step_metrics import MetricValue
from tpu_grpo.records.json_files import encode_line, keep_steps
from tpu_grpo.records.stages import Histogram, ScoredRollout


class Sink(Protocol):
    """Receives the metrics of a run: one thread calls ``write`` once per step, and ``samples`` at some steps.

    Subclasses inherit methods that do nothing.
    """

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Receive the metrics of one step; they include ``step``."""

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Receive all B rows of a step."""
        return

    def close(self) -> None:
        """Finish writing; no other call follows."""
        return


class Tracker(Sink, Protocol):
    """A sink that receives histograms, too."""

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Receive the histograms of a step, by name."""


class RunLog:
    """Passes the metrics of every step, and the samples of some steps, to sinks in order; then calls the callbacks."""

    def __init__(self, sinks: Sequence[Sink], callbacks: Sequence[Callback] = ()) -> None:
        self._sinks, self._callbacks = tuple(sinks), tuple(callbacks)

    @property
    def asked_to_stop(self) -> bool:
        """Whether a callback wants the run to stop."""
        return any(callback.asked_to_stop for callback in self._callbacks)

    def step(
        self,
        metrics: Mapping[str, MetricValue],
        scored: ScoredRollout | None = None,
        advantages: Float[np.ndarray, " B"] | None = None,
    ) -> None:
        """Log the metrics of one step, which include ``step``. Callbacks also get the B rows of ``scored``.

        Raises:
            CallbackError: a callback failed.
        """
        for sink in self._sinks:
            sink.write(metrics)
        if self._callbacks:
            rows = [] if scored is None or advantages is None else sample_rows(scored, advantages)
            self._call("on_step", metrics, [sample_fields(row) for row in rows])

    def evaluation(self, evaluation: Evaluation, samples: Sequence[EvaluationSamples]) -> None:
        """Call the callbacks with an evaluation; raises CallbackError if one failed."""
        if self._callbacks:
            records = [record for of_mode in samples for record in sample_records(of_mode)]
            self._call("on_evaluation", {"step": evaluation.step, **evaluation.metrics()}, records)

    def _call(self, event: str, metrics: Mapping[str, MetricValue], samples: Sequence[Mapping[str, Any]]) -> None:
        for callback in self._callbacks:
            callback.call(event, metrics, samples)

    def samples(self, step: int, scored: ScoredRollout, advantages: Float[np.ndarray, " B"]) -> None:
        """Log all B rows of a step."""
        rows = sample_rows(scored, advantages)
        for sink in self._sinks:
            sink.samples(step, rows)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log the histograms of a step, if there are any, to trackers."""
        for sink in self._sinks:
            if histograms and isinstance(sink, OptionalSink):
                sink.histograms(step, histograms)

    def note(self, text: str) -> None:
        """Show a line to the user; it is not logged."""
        for sink in self._sinks:
            if isinstance(sink, ConsoleSink):
                sink.note(text)

    def close(self) -> None:
        """Close every sink, even if one raises."""
        with contextlib.ExitStack() as stack:
            for sink in reversed((*self._sinks, *self._callbacks)):
                stack.callback(sink.close)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_run_log(
    run_dir: Path,
    run: RunSection,
    section: LoggingSection,
    settings: Mapping[str, Any],
    start_step: int,
    *more: Sink,
    evaluation_every: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunLog:
    """Open the sinks of a run. ``start_step`` is the number of steps already done, 0 for a new run.

    ``settings`` are the settings that callbacks and trackers get, by section. ``more`` are further sinks, which get
    every step once it is on disk. ``evaluation_every`` is None for a run without evaluations.

    Raises:
        DataError: for broken metrics or samples of an earlier part of the run.
        CallbackError: for a callback whose constructor fails.
    """
    console = ConsoleSink(start_step, run.max_steps, evaluation_every=evaluation_every)
    try:
        files = JsonlSink(run_dir, start_step)
        for callback in callbacks:
            callback.begin(settings)
        trackers = _trackers(run_dir, run.name, section, settings, start_step, console.note)
        return RunLog([files, console, *more, *trackers], callbacks)
    except BaseException:
        RunLog([console], callbacks).close()  # stops the progress bar; a callback's ``close`` is called in any case
        raise


def _trackers(
    run_dir: Path,
    name: str,
    section: LoggingSection,
    settings: Mapping[str, Any],
    start_step: int,
    say: Callable[[str], None],
) -> Iterator["OptionalSink"]:
    if not section.has_trackers:
        return
    from tpu_grpo.observe.trackers import TensorBoardSink, WandbSink

    if section.tensorboard:
        remedy = "Set logging.tensorboard=false to do without"
        yield OptionalSink("TensorBoard", remedy, lambda: TensorBoardSink(run_dir, start_step), say)
    if (mode := section.wandb) != "off":
        remedy = "Set logging.wandb=offline or off to do without the server"
        yield OptionalSink("wandb", remedy, lambda: WandbSink(run_dir, name, section, mode, settings, say), say)


class JsonlSink:
    """Writes a line per step and a line per sample; a kill loses at most the line being written.

    ``start_step`` is the number of steps already done, 0 for a new run. A run that resumes at a checkpoint of step s
    may have logged later steps before it stopped. These steps will be done again, so their lines are dropped, as is a
    last line that a kill cut off. All lines up to step s are kept:

        on disk: steps 1 2 3 4 5, start_step=3  ->  on disk: 1 2 3; the next line is step 4

    Raises:
        DataError: for a file of an earlier part of the run in which a line other than the last is broken.
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
    """Passes everything on to a sink until the sink fails; then shows one line, and drops the sink.

    An error in the sink's library, whatever its type, neither ends the run nor reaches the other sinks. ``open_sink``,
    which makes the sink, may fail, too. ``say`` shows the line, which gives the sink's ``name`` and the ``remedy``.
    """

    def __init__(self, name: str, remedy: str, open_sink: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self._name, self._remedy, self._say = name, remedy, say
        self._sink = self._try("starting", open_sink)

    def write(self, metrics: Mapping[str, MetricValue]) -> None:
        """Pass one step on."""
        if (sink := self._sink) is not None:
            self._try("logging", lambda: sink.write(metrics))

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Pass the rows of a step on."""
        if (sink := self._sink) is not None:
            self._try("logging samples", lambda: sink.samples(step, rows))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Pass the histograms of a step on."""
        if (sink := self._sink) is not None:
            self._try("logging histograms", lambda: sink.histograms(step, histograms))

    def close(self) -> None:
        """Finish the sink, unless it has failed."""
        if (sink := self._sink) is not None:
            self._try("finishing", sink.close)

    def _try[T](self, doing: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            self._sink = None
            self._say(
                f"{self._name} failed while {doing} ({type(error).__name__}: {error}); the run goes on without it, and "
                f"its own files are complete. {self._remedy}"
            )
            return None
