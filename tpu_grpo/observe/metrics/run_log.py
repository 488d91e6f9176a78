"""The single object through which a run logs its metrics.

with open_run_log(config, start_step=0) as log:          # on host 0; RunLog([]) on the others
    log.step({"step": 1, **rollout_metrics(scored), ...})
    log.samples(1, scored, update.advantages)
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import RunConfig
from tpu_grpo.observe.metrics.console import ConsoleSink
from tpu_grpo.observe.metrics.conversations import sampled_conversation
from tpu_grpo.observe.metrics.optional_sink import OptionalSink
from tpu_grpo.observe.metrics.sinks import JsonlSink, SampleRow, Sink
from tpu_grpo.observe.metrics.tensorboard_sink import TensorBoardSink, check_library
from tpu_grpo.observe.metrics.values import MetricValue
from tpu_grpo.observe.metrics.wandb_sink import WandbSink
from tpu_grpo.records.stages import ScoredRollout


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
        check_library()
    console = ConsoleSink(start_step, config.run.max_steps)
    try:
        files = JsonlSink(config.run_dir, start_step)
        return RunLog([files, console, *more, *_optional_sinks(config, start_step, console)])
    except BaseException:
        console.close()  # gives the terminal back
        raise


def _optional_sinks(config: RunConfig, start_step: int, console: ConsoleSink) -> Iterator[OptionalSink]:
    """Open the sinks that a run can do without; each fails alone."""
    if config.logging.tensorboard:
        remedy = "Set logging.tensorboard=false to do without"
        yield OptionalSink("TensorBoard", remedy, lambda: TensorBoardSink(config.run_dir, start_step), console.note)
    if (mode := config.logging.wandb) != "off":
        settings, project = config.model_dump(mode="json"), config.logging.wandb_project
        remedy = "Set logging.wandb=offline or off to do without the server"
        name = config.run.name
        yield OptionalSink(
            "wandb",
            remedy,
            lambda: WandbSink(config.run_dir, name, project, mode, settings, console.note),
            console.note,
        )


def sample_rows(scored: ScoredRollout, advantages: Float[np.ndarray, " B"]) -> list[SampleRow]:
    """Return the B rows of a step as people read them, in order.

    Raises:
        ValueError: for a number of advantages that is not B.
    """
    rollout, scores = scored.rollout, scored.scores
    rows = zip(rollout.row_prompts, rollout.completions, rollout.texts, advantages, strict=True)
    return [
        SampleRow(
            prompt=prompt.text if completion.episode is None else completion.episode.prompt,
            completion=text,
            rewards={name: _applicable(rewards_B[row]) for name, rewards_B in scores.by_name.items()},
            reward=float(scores.total[row]),
            advantage=float(advantage),
            tokens=completion.sampled_tokens,
            finish_reason=completion.finish_reason,
            per_token=tuple(map(float, scores.per_token[row])) if scores.per_token else (),
            gold=prompt.gold,
            conversation=sampled_conversation(completion),
        )
        for row, (prompt, completion, text, advantage) in enumerate(rows)
    ]


def _applicable(reward: float) -> float | None:
    return None if math.isnan(reward) else float(reward)
