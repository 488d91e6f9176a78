"""``report.html``: a run on one page that needs nothing else, made from the files the run left.

Shown is what is there: a metric no line has gives no plot, a file that is missing no section.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from tpu_grpo.errors import DataError
from tpu_grpo.metrics.jsonl import read_records, replace_text
from tpu_grpo.metrics.plots import Lines, Plot, render_plots
from tpu_grpo.metrics.report_style import CSS
from tpu_grpo.metrics.sinks import METRICS_FILE, SAMPLES_FILE
from tpu_grpo.metrics.summary import EDGE_STEPS, SUMMARY_FILE

REPORT_FILE = "report.html"
CONFIG_FILE = "config.yaml"
EVALUATION_FILE = "evaluation.jsonl"
SHOWN_ROWS = 4

Record = dict[str, Any]


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from ``metrics.jsonl`` and, where they are, the other files of the run.

    Raises:
        DataError: without metrics, or for a file that cannot be read as what it should be.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise DataError(f"a report needs {path}, which is missing; give the directory of a run (run.dir)")
    lines = list(read_records(path))
    evaluations = _read_evaluations(run_dir / EVALUATION_FILE)
    config = _read_text(run_dir / CONFIG_FILE)
    body = [
        _header(_run_name(config, run_dir), lines),
        _key_figures(lines, evaluations),
        _plots(render_plots(_with_step_zero(lines, evaluations))),
        _samples(*_first_and_last_samples(run_dir / SAMPLES_FILE)),
        _folded("Configuration", config),
        _folded("Summary", _read_text(run_dir / SUMMARY_FILE)),
    ]
    report = run_dir / REPORT_FILE
    replace_text(report, _page(_run_name(config, run_dir), "\n".join(part for part in body if part)))
    return report


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_evaluations(path: Path) -> list[Record]:
    return list(read_records(path)) if path.is_file() else []


def _with_step_zero(lines: Lines, evaluations: Lines) -> list[Mapping[str, Any]]:
    """The steps, and before them an evaluation that was done before the first."""
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
    """Rows of the first and of the last sampled step, without holding those between; both empty without a file."""
    first: list[Record] = []
    last: list[Record] = []
    for row in read_records(path) if path.is_file() else ():
        if not first or row["step"] == first[0]["step"]:
            first.append(row)
        else:
            last = [*last, row] if last and last[0]["step"] == row["step"] else [row]
    return first, last


# --- sections --------------------------------------------------------------------------------------------------------


def _header(name: str, lines: Lines) -> str:
    steps = f"{len(lines)} step{'' if len(lines) == 1 else 's'}" if lines else "no steps yet"
    return f"<header><h1>{escape(name)}</h1><p>{steps}</p></header>"


def _key_figures(lines: Lines, evaluations: Lines) -> str:
    rewards = _numbers(line.get("rewards/mean") for line in lines)
    speeds = sorted(_numbers(line.get("rollout/tokens_per_second") for line in lines))
    gaps = _numbers(line.get("agreement/logprob_abs_diff_max") for line in lines)
    compiled = _numbers(line.get("compile/count") for line in lines)
    figures: list[tuple[str, str, str]] = []
    if rewards:
        first, last = _mean(rewards[:EDGE_STEPS]), _mean(rewards[-EDGE_STEPS:])
        over = f"mean of {min(EDGE_STEPS, len(rewards))}" if len(rewards) > 1 else ""
        figures += [("first reward", f"{first:.3f}", over), ("last reward", f"{last:.3f}", over)]
        figures += [("change of reward", f"{last - first:+.3f}", "")]
    figures += _evaluation_figures(evaluations)
    if speeds:
        figures.append(("tokens per second", f"{speeds[len(speeds) // 2]:,.0f}", "median"))
    if gaps:
        figures.append(("log-probability gap", f"{max(gaps):.1e}", "largest"))
    if compiled:
        figures.append(("compilations", f"{compiled[-1]:.0f}", ""))
    cards = [
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)} <small>{escape(note)}</small></dd></div>"
        for label, value, note in figures
    ]
    return f'<dl class="figures">{"".join(cards)}</dl>' if cards else ""


def _evaluation_figures(evaluations: Lines) -> list[tuple[str, str, str]]:
    """Each value of the first and of the last evaluation."""
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    names = [name for name in last if name.startswith("evaluation/") and name in first]
    return [
        (name.removeprefix("evaluation/").replace("/", " ").replace("_", " "), f"{first[name]:.3f} → {last[name]:.3f}",
         "held out")
        for name in names
    ]  # fmt: skip


def _plots(plots: Sequence[Plot]) -> str:
    figures = [
        f"<figure><figcaption>{escape(p.title)}<span>{escape(p.note)}</span></figcaption>{p.svg}</figure>"
        for p in plots
    ]
    return f'<h2>Plots</h2><div class="plots">{"".join(figures)}</div>' if figures else ""


def _samples(first: Sequence[Record], last: Sequence[Record]) -> str:
    tables = [
        f"<h2>Samples of step {escape(str(rows[0]['step']))}</h2>{_sample_table(_best_and_worst(rows))}"
        for rows in (first, last)
        if rows
    ]
    return "".join(tables)


def _best_and_worst(rows: Sequence[Record]) -> list[Record]:
    ranked = sorted(rows, key=lambda row: -_or_zero(row["reward"]))
    half = SHOWN_ROWS // 2
    return ranked if len(ranked) <= SHOWN_ROWS else [*ranked[:half], *ranked[-half:]]


def _sample_table(rows: Sequence[Record]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    numbers = [*names, *(["total"] if len(names) > 1 else []), "advantage", "tokens"]
    head = "".join(f"<th>{text}</th>" for text in ("prompt", "completion"))
    head += "".join(f'<th class="number">{escape(text)}</th>' for text in numbers)
    body = "".join(f"<tr>{_sample_cells(row, names)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _sample_cells(row: Record, names: Sequence[str]) -> str:
    cut = "" if row["finish_reason"] == "stop" else '<p class="cut">cut at the longest length</p>'
    numbers = [row["rewards"].get(name) for name in names]
    numbers += [row["reward"]] if len(names) > 1 else []
    cells = [_text_cell(row["prompt"]), _text_cell(row["completion"], cut)]
    cells += [f'<td class="number">{_decimal(n)}</td>' for n in numbers]
    return "".join(
        [*cells, f'<td class="number">{_decimal(row["advantage"], "+.2f")}</td>', _count_cell(row["tokens"])]
    )


def _text_cell(text: Any, below: str = "") -> str:
    return f'<td><div class="text">{escape(str(text))}</div>{below}</td>'


def _count_cell(count: Any) -> str:
    return f'<td class="number">{escape(str(count))}</td>'


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>" if text else ""


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


# --- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(values: Iterable[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, int | float)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _or_zero(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _decimal(value: Any, form: str = ".2f") -> str:
    return format(value, form) if isinstance(value, int | float) else "–"
