"""Writes the page that goes with an exported model: what it is, how it was trained, and what came of it.

The text is ``templates/model_card.md.jinja``; its figures are read here from the files that the run left.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jinja2

from tpu_grpo.observe.json_lines import Lines, Record, interval_of, is_number, numbers, read_steps
from tpu_grpo.observe.run_files import EVALUATION_FILE, METRICS_FILE
from tpu_grpo.observe.summary import edge_means

CARD_FILE = "README.md"
TEMPLATES = Path(__file__).with_name("templates")
TEMPLATE = "model_card.md.jinja"


@dataclass(frozen=True)
class ModelFacts:
    """Says which model a page is about."""

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
    """Whether adapters were merged into it."""


class Row(NamedTuple):
    """A figure of the run: before the first step, and after the step of the model."""

    name: str
    before: str
    after: str


def write_model_card(
    directory: Path, run_dir: Path, facts: ModelFacts, config: str, versions: Mapping[str, str]
) -> None:
    """Write the page into a directory, with the figures that the run has up to the step of the model.

    Args:
        directory: that of the exported model.
        run_dir: where the run left its figures; those that are not there are left out.
        facts: says which model this is.
        config: the run's config as YAML.
        versions: those of the libraries that write this.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,  # it is Markdown
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template(TEMPLATE).render(
        facts=facts, figures=list(_figures(run_dir, facts.step)), config=config, versions=versions
    )
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
    """Write a value with its interval, where it has one, and the step that it is of."""
    if not is_number(value := record.get(name)):
        return ""
    low, high = interval_of(record, name)
    interval = f" ({low:.3f} to {high:.3f})" if low <= high else ""
    return f"{value:.3f}{interval}, step {record['step']}"
