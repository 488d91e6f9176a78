"""Writes the page of a run, a single self-contained file, from the files that the run has left so far.

Charts of missing metrics and sections of missing files are left out. Nothing here imports jax. The page's script shows
the values under the mouse, and reloads the page of a run that goes on.
"""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

import jinja2

from tpu_grpo.observe.json_lines import Lines, is_number, numbers
from tpu_grpo.observe.run_files import REPORT_FILE
from tpu_grpo.observe.standing import Standing
from tpu_grpo.observe.summary import EDGE_STEPS
from tpu_grpo.records.json_files import replace_text
from tpu_grpo.report.chart_drawing import SIDE, draw
from tpu_grpo.report.charts import evaluation_label, evaluation_lines, run_charts
from tpu_grpo.report.page_tables import Cell, Column, Table, best_name, evaluation_table, held_out_table, step_table
from tpu_grpo.report.planned import plan_table, read_planned
from tpu_grpo.report.run_reader import RunRead, read_run, setting_of

AGAIN_SECONDS = 20
"""The interval at which browsers reload the page of a run that goes on."""


def write_report(
    run_dir: Path,
    *,
    goes_on: bool = False,
    standing: Standing | None = None,
    path: Path | None = None,
) -> Path:
    """Write ``report.html`` atomically, and return its path.

    ``goes_on`` says whether a process uses the directory. ``standing`` is the state of the run, if the caller knows it;
    otherwise it is taken from the files. The page is written to ``path``, by default into ``run_dir``.

    Raises:
        DataError: for a directory that is not a run's, or a malformed file.
    """
    path = path or run_dir / REPORT_FILE
    run = read_run(run_dir, goes_on=goes_on, standing=standing)
    best = best_name(run.config, run.evaluations).rpartition("/")[2]
    tables = [evaluation_table(run), held_out_table(run.held_out, best), *map(step_table, run.samples), _changes(run)]
    tables.append(plan_table(run.lines, read_planned(run_dir)))
    write_page(
        path,
        "run.html.jinja",
        title=run.name,
        again=AGAIN_SECONDS if run.standing.outcome == "going" else 0,
        settings=_settings_line(run.config),
        standing=run.standing,
        figures=list(_figures(run)),
        drawings=[draw(chart) for chart in run_charts(run)],
        tables=[table for table in tables if table is not None],
        config=run.config_text,
        summary=run.summary_text,
    )
    return path


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render a template of this package to a page, atomically; other processes may write the page at the same time."""
    replace_text(path, rendered(template, autoescape=True, side=SIDE, **values), temporary=f".{os.getpid()}.tmp")


def rendered(template: str, *, autoescape: bool, **values: Any) -> str:
    """Render a file of report/templates. Without ``autoescape`` (Markdown), the indent of block tags is removed."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=not autoescape,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


class Figure(NamedTuple):
    """A figure at the top of the page."""

    label: str
    value: str
    note: str = ""


class Reward(NamedTuple):
    """The mean reward of the first and of the last ``steps`` steps; the two overlap only in a run of one step."""

    first: float
    last: float
    steps: int


def reward_of(lines: Lines) -> Reward | None:
    """Return the mean reward of the first and the last steps, five of each if there are ten; None without a reward.

    Shorter runs average half of their steps, so that a change shows from two steps on. A single step counts as both.
    """
    if not (values := numbers(lines, "rewards/mean")):
        return None
    count = max(1, min(EDGE_STEPS, len(values) // 2))
    return Reward(sum(values[:count]) / count, sum(values[-count:]) / count, count)


def median_seconds(lines: Lines) -> str:
    """Return the median of the seconds per step as text; empty if no step was timed."""
    seconds = numbers(lines, "step/seconds")
    return f"{median_high(seconds):.3g}" if seconds else ""


def median_speed(lines: Lines) -> str:
    """Return the median of the sampled tokens per second as text; empty if it is not known."""
    speeds = numbers(lines, "rollout/tokens_per_second")
    return f"{median_high(speeds):,.0f}" if speeds else ""


def _figures(run: RunRead) -> Iterator[Figure]:
    """Yield up to four figures: reward, held-out reward, seconds per step, and log-probability gap."""
    if reward := reward_of(run.lines):
        several = f", each the mean of {reward.steps} steps" if reward.steps > 1 else ""
        if len(numbers(run.lines, "rewards/mean")) > 1:
            change = f"{reward.last - reward.first:+.3f}{several}"
            yield Figure("reward, first → last", f"{reward.first:.3f} → {reward.last:.3f}", change)
        else:
            yield Figure("reward", f"{reward.first:.3f}", "of one step")
    records = evaluation_lines(run)
    if name := best_name(run.config, records):
        first, last = numbers(records, name)[0], numbers(records, name)[-1]
        times = f"{first:.3f} → {last:.3f}" if len(records) > 1 else f"{last:.3f}"
        yield Figure("held out", times, evaluation_label(name))
    if seconds := median_seconds(run.lines):
        speed = median_speed(run.lines)
        yield Figure("seconds per step, median", seconds, f"{speed} tokens/s sampled" if speed else "")
    if gaps := numbers(run.lines, "agreement/logprob_abs_diff_max"):
        yield Figure("log-probability gap", f"{max(gaps):.1e}", "largest, engine against trainer")


def _settings_line(config: Mapping[str, Any]) -> str:
    """Describe a run in one line: model, data, algorithm, sizes and learning rate, as far as the config has them."""
    setting = partial(setting_of, config)
    prompts, group = setting("data", "prompts_per_step"), setting("algorithm", "group_size")
    rate = setting("optimizer", "learning_rate")
    parts = [
        setting("model", "path"),
        setting("data", "path"),
        setting("algorithm", "name"),
        f"{prompts} prompts × {group} completions a step" if prompts and group else None,
        f"learning rate {rate:g}" if is_number(rate) else None,
    ]
    return " · ".join(dict.fromkeys(str(part) for part in parts if part))


def _changes(run: RunRead) -> Table | None:
    if not run.changes:
        return None
    columns = [Column("after step", is_number=True), Column("setting"), Column("before"), Column("since")]
    rows = [[Cell(str(change[key])) for key in ("step", "name", "old", "new")] for change in run.changes]
    return Table("Changed while the run went on", "", columns, rows)
