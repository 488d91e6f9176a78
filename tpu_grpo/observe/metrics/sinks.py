"""Defines what a sink is, and the one every run has, which writes ``metrics.jsonl`` and ``samples.jsonl``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from tpu_grpo.observe.metrics.conversations import SampledConversation
from tpu_grpo.observe.metrics.jsonl import encode_line, keep_records
from tpu_grpo.observe.metrics.run_files import METRICS_FILE, SAMPLES_FILE
from tpu_grpo.observe.metrics.values import MetricValue
from tpu_grpo.records.stages import FinishReason


@dataclass(frozen=True)
class SampleRow:
    """Holds one row of a step as people read it."""

    prompt: str
    completion: str
    rewards: Mapping[str, float | None]
    """The value of each reward by its name in the metrics, before weighting; None where a reward does not apply."""
    reward: float
    """The weighted sum of the rewards."""
    advantage: float
    tokens: int
    """How many tokens of the completion were sampled."""
    finish_reason: FinishReason
    per_token: tuple[float, ...] = ()
    """What was added to the advantage of each token; empty for nothing."""
    gold: str | None = None
    """The right answer; None where the prompt's record has none."""
    conversation: SampledConversation | None = None
    """What the completion is, if it is a conversation with an environment; the prompt is its first one then."""


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
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = _continue_file(run_dir / METRICS_FILE, start_step)
        self._samples = _continue_file(run_dir / SAMPLES_FILE, start_step)

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


def _continue_file(path: Path, start_step: int) -> IO[bytes]:
    keep_records(path, lambda record: record.get("step", 0) <= start_step)
    return path.open("ab")


def sample_fields(row: SampleRow) -> dict[str, object]:
    """Return a row as a line of ``samples.jsonl`` has it, after its step."""
    return {
        "prompt": row.prompt,
        "completion": row.completion,
        **({} if row.gold is None else {"gold": row.gold}),
        "rewards": dict(row.rewards),
        "reward": row.reward,
        "advantage": row.advantage,
        "tokens": row.tokens,
        "finish_reason": row.finish_reason,
        **({"per_token": list(row.per_token)} if row.per_token else {}),
        **(row.conversation.fields() if row.conversation else {}),
    }
