"""Writes the model card of an exported model: what the model is, how it was trained, and the results.

The text is ``templates/model_card.md.jinja``; its figures are read here from the files that the run left.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpu_grpo.observe.json_lines import Lines, interval_of, is_number, numbers
from tpu_grpo.observe.run_files import EVALUATION_FILE, METRICS_FILE
from tpu_grpo.observe.summary import edge_means
from tpu_grpo.records.json_files import Record, read_steps
from tpu_grpo.report.run_page import rendered

CARD_FILE = "README.md"
TEMPLATE = "model_card.md.jinja"


@dataclass(frozen=True)
class ModelFacts:
    """The facts about the exported model."""

    run: str
    """The name of the run."""
    step: int
    base: str
    """The model that the run started from."""
    kind: str
    """"model" or "adapter"; see ``export.kind``."""
    family: str
    dtype: str
    parameters: int
    merged: bool
    """Whether adapters were merged into the model's weights."""


class Row(NamedTuple):
    """A result of the run: its first value, and its last value up to the model's step."""

    name: str
    before: str
    after: str


def write_model_card(
    directory: Path, run_dir: Path, facts: ModelFacts, config: str, versions: Mapping[str, str]
) -> None:
    """Write the model card into the directory of an exported model, with the run's figures up to the model's step.

    Figures that ``run_dir`` lacks are left out. ``config`` is the run's config as YAML.
    """
    figures = list(_figures(run_dir, facts.step))
    text = rendered(TEMPLATE, autoescape=False, facts=facts, figures=figures, config=config, versions=versions)
    (directory / CARD_FILE).write_text(text, encoding="utf-8")


def _figures(run_dir: Path, step: int) -> Iterator[Row]:
    steps = _until(run_dir / METRICS_FILE, step)
    if rewards := numbers(steps, "rewards/mean"):
        first, last = edge_means(rewards)
        yield Row("reward, mean of the first five steps and of the last five", f"{first:.3f}", f"{last:.3f}")
    if evaluations := _until(run_dir / EVALUATION_FILE, step):
        before, after = evaluations[0], evaluations[-1]
        for name in after:
            if name.startswith("evaluation/") and is_number(after[name]):
                # evaluation/greedy/exact_answer is "held out, greedy, exact_answer"
                label = ", ".join(["held out", *name.split("/")[1:]])
                yield Row(label, _estimate(before, name), _estimate(after, name))


def _until(path: Path, step: int) -> Lines:
    return [record for record in read_steps(path) if record["step"] <= step]


def _estimate(record: Record, name: str) -> str:
    """Format a metric's value with its step and, if it has one, its interval; empty if the record lacks the metric."""
    if not is_number(value := record.get(name)):
        return ""
    low, high = interval_of(record, name)
    interval = f" ({low:.3f} to {high:.3f})" if low <= high else ""
    return f"{value:.3f}{interval}, step {record['step']}"
