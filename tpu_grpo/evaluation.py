"""Accuracy on held-out prompts: every reward's mean, greedy and sampled, and a file that remembers all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpu_grpo.metrics.jsonl import encode_line, keep_records, read_records
from tpu_grpo.metrics.report import EVALUATION_FILE
from tpu_grpo.types import Prompt, Rollout, Scores


@dataclass(frozen=True)
class Evaluation:
    """How good the policy was after ``step`` steps: mode (greedy, sampled) -> reward name -> mean."""

    step: int
    means: Mapping[str, Mapping[str, float]]

    def metrics(self) -> dict[str, float]:
        """``evaluation/<mode>/<reward>`` values."""
        return {f"evaluation/{mode}/{name}": v for mode, means in self.means.items() for name, v in means.items()}


def evaluate(
    answer: Callable[..., Rollout],
    score: Callable[[Rollout], Scores],
    prompts: Sequence[Prompt],
    *,
    step: int,
    temperature: float,
    display_names: Mapping[str, str],
) -> Evaluation:
    """Answer every prompt once greedily and once sampled, and score both. A reward that applies nowhere is left out."""
    means = {}
    for mode, heat in (("greedy", 0.0), ("sampled", temperature)):
        scores = score(answer(prompts, temperature=heat))
        means[mode] = {
            display_names[name]: float(np.nanmean(values))
            for name, values in scores.by_name.items()
            if not np.isnan(values).all()
        }
    return Evaluation(step, means)


class EvaluationLog:
    """``evaluation.jsonl``: one line per evaluation, continued when a run is."""

    def __init__(self, run_dir: Path, start_step: int, *, writes: bool = True):
        self._path = run_dir / EVALUATION_FILE
        self._writes = writes
        if writes and self._path.exists():
            keep_records(self._path, lambda record: 0 < start_step >= record["step"])  # a fresh start keeps none
        records = read_records(self._path) if writes and self._path.exists() else ()
        self.done = [_from_record(record) for record in records]

    def add(self, evaluation: Evaluation) -> None:
        """Remember an evaluation."""
        self.done.append(evaluation)
        if not self._writes:
            return
        with self._path.open("ab") as file:
            file.write(encode_line({"step": evaluation.step, **evaluation.metrics()}))

    def summary(self) -> dict[str, Any]:
        """The first and the last evaluation, as summary.json has them."""
        if not self.done:
            return {}
        return {"evaluation/before": self.done[0].means, "evaluation/after": self.done[-1].means}


def _from_record(record: dict[str, Any]) -> Evaluation:
    means: dict[str, dict[str, float]] = {}
    for name, value in record.items():
        if name != "step":
            _, mode, reward = name.split("/", 2)
            means.setdefault(mode, {})[reward] = value
    return Evaluation(record["step"], means)
