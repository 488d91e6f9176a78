"""Writes ``report.html``, which shows a run on one page that needs nothing else, from the files that the run left.

What is there is shown: a metric that no line has gives no plot, a file that is missing no section. The page itself is
``templates/report.html.jinja``; here its values are read and prepared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

from tpu_grpo.errors import DataError
from tpu_grpo.metrics.jsonl import read_records, replace_text
from tpu_grpo.metrics.lines import Lines, Record, is_number, names_in, number_or_zero, numbers
from tpu_grpo.metrics.plots import render_plots
from tpu_grpo.metrics.run_files import (
    CHANGES_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
)
from tpu_grpo.metrics.summary import EDGE_STEPS, edge_means

TEMPLATES = Path(__file__).with_name("templates")
TEMPLATE = "report.html.jinja"
SHOWN_ROWS = 4
"""How many samples of a step are shown: half of them the best, half the worst."""


@dataclass(frozen=True)
class KeyFigure:
    """Holds one of the figures at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class TableRow:
    """Holds one completion as a table shows it."""

    prompt: str
    completion: str
    is_cut: bool
    numbers: tuple[str, ...]
    """One text per column of the table."""


@dataclass(frozen=True)
class SampleTable:
    """Holds the samples of a step that are shown."""

    step: int
    columns: tuple[str, ...]
    """The columns beside prompt and completion: rewards, their total if there are several, advantage, tokens."""
    rows: tuple[TableRow, ...]


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from ``metrics.jsonl`` and, where they are, the other files of the run.

    Raises:
        DataError: without metrics, or for a file that cannot be read as what it should be.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise DataError(f"a report needs {path}, which is missing; give the directory of a run (run.dir)")
    lines = list(read_records(path))
    evaluations = list(read_records(run_dir / EVALUATION_FILE, missing_ok=True))
    config = _read_text(run_dir / CONFIG_FILE)
    page = _template().render(
        name=_run_name(config, run_dir),
        steps=len(lines),
        key_figures=list(_key_figures(lines, evaluations)),
        plots=render_plots(_with_step_zero(lines, evaluations)),
        samples=[_sample_table(rows) for rows in _first_and_last_samples(run_dir / SAMPLES_FILE) if rows],
        changes=list(read_records(run_dir / CHANGES_FILE, missing_ok=True)),
        config=config,
        summary=_read_text(run_dir / SUMMARY_FILE),
    )
    report = run_dir / REPORT_FILE
    replace_text(report, page)
    return report


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE)


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _with_step_zero(lines: Lines, evaluations: Lines) -> list[Record]:
    """Return the steps, and before them an evaluation that was done before the first."""
    return [record for record in evaluations if record["step"] == 0] + list(lines)


def _run_name(config_text: str, run_dir: Path) -> str:
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError as error:
        raise DataError(f"{run_dir / CONFIG_FILE} must be YAML ({error}); remove or mend it") from error
    run = config.get("run") if isinstance(config, dict) else None
    name = run.get("name") if isinstance(run, dict) else None
    return str(name or run_dir.resolve().name)


def _first_and_last_samples(path: Path) -> tuple[list[Record], list[Record]]:
    """Read the rows of the first and of the last sampled step, without holding those between; both may be empty."""
    first: list[Record] = []
    last: list[Record] = []
    for row in read_records(path, missing_ok=True):
        if not first or row["step"] == first[0]["step"]:
            first.append(row)
        else:
            last = [*last, row] if last and last[0]["step"] == row["step"] else [row]
    return first, last


# --- key figures -----------------------------------------------------------------------------------------------------


def _key_figures(lines: Lines, evaluations: Lines) -> Iterator[KeyFigure]:
    if rewards := numbers(lines, "rewards/mean"):
        first, last = edge_means(rewards)
        over = f"mean of {min(EDGE_STEPS, len(rewards))}" if len(rewards) > 1 else ""
        yield KeyFigure("first reward", f"{first:.3f}", over)
        yield KeyFigure("last reward", f"{last:.3f}", over)
        yield KeyFigure("change of reward", f"{last - first:+.3f}")
    yield from _evaluation_figures(evaluations)
    if speeds := sorted(numbers(lines, "rollout/tokens_per_second")):
        yield KeyFigure("tokens per second", f"{speeds[len(speeds) // 2]:,.0f}", "median")
    if gaps := numbers(lines, "agreement/logprob_abs_diff_max"):
        yield KeyFigure("log-probability gap", f"{max(gaps):.1e}", "largest")
    if compiled := numbers(lines, "compile/count"):
        yield KeyFigure("compilations", f"{compiled[-1]:.0f}")


def _evaluation_figures(evaluations: Lines) -> Iterator[KeyFigure]:
    """Compare each value of the first evaluation with that of the last."""
    if not evaluations:
        return
    first, last = evaluations[0], evaluations[-1]
    for name in last:
        if name.startswith("evaluation/") and name in first:
            label = name.removeprefix("evaluation/").replace("/", " ").replace("_", " ")
            yield KeyFigure(label, f"{first[name]:.3f} → {last[name]:.3f}", "held out")


# --- samples ---------------------------------------------------------------------------------------------------------


def _sample_table(rows: Sequence[Record]) -> SampleTable:
    """Prepare the best and the worst rows of a step."""
    shown = _best_and_worst(rows)
    rewards = names_in(row["rewards"] for row in shown)
    total = ["total"] if len(rewards) > 1 else []
    return SampleTable(
        step=rows[0]["step"],
        columns=(*rewards, *total, "advantage", "tokens"),
        rows=tuple(_table_row(row, rewards) for row in shown),
    )


def _best_and_worst(rows: Sequence[Record]) -> list[Record]:
    ranked = sorted(rows, key=lambda row: -number_or_zero(row["reward"]))
    half = SHOWN_ROWS // 2
    return ranked if len(ranked) <= SHOWN_ROWS else [*ranked[:half], *ranked[-half:]]


def _table_row(row: Record, rewards: Sequence[str]) -> TableRow:
    values = [row["rewards"].get(name) for name in rewards]
    values += [row["reward"]] if len(rewards) > 1 else []
    return TableRow(
        prompt=row["prompt"],
        completion=row["completion"],
        is_cut=row["finish_reason"] != "stop",
        numbers=(*map(_decimal, values), _decimal(row["advantage"], "+.2f"), str(row["tokens"])),
    )


def _decimal(value: Any, form: str = ".2f") -> str:
    return format(value, form) if is_number(value) else "–"
