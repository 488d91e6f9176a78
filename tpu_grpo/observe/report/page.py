"""Writes the page of a run, which needs nothing but itself, from the files that the run has left so far.

What is there is shown: a metric that no line has gives no chart, a file that is missing no section.
"""

import os
from pathlib import Path
from typing import Any

import jinja2

from tpu_grpo.observe.metrics.jsonl import replace_text
from tpu_grpo.observe.metrics.run_files import REPORT_FILE
from tpu_grpo.observe.report.charts import run_charts
from tpu_grpo.observe.report.drawing import SIDE, draw
from tpu_grpo.observe.report.overview import best_name, evaluation_table, figures, settings_line
from tpu_grpo.observe.report.reading import RunRead, read_run
from tpu_grpo.observe.report.samples import held_out_table, step_table
from tpu_grpo.observe.report.standing import Standing
from tpu_grpo.observe.report.tables import Cell, Column, Table

TEMPLATES = Path(__file__).with_name("templates")
AGAIN_SECONDS = 20
"""The page of a run that goes on is loaded again so often."""


def write_report(
    run_dir: Path, *, goes_on: bool = False, standing: Standing | None = None, path: Path | None = None
) -> Path:
    """Write ``report.html`` as a whole or not at all, and return where it is.

    Args:
        run_dir: the directory of a run.
        goes_on: whether a process has the directory.
        standing: how the run stands, for whoever knows it better than the files.
        path: where to write; in the run's directory when None.

    Raises:
        DataError: for a directory that is no run's, or a file that cannot be read as what it should be.
    """
    path = path or run_dir / REPORT_FILE
    write_page(path, run_page(read_run(run_dir, goes_on=goes_on, standing=standing)))
    return path


def run_page(run: RunRead) -> str:
    """Write the page of a run as HTML."""
    best = best_name(run.config, run.evaluations).rpartition("/")[2]
    tables = [evaluation_table(run), held_out_table(run.held_out, best), *map(step_table, run.samples), _changes(run)]
    return render(
        "run.html.jinja",
        title=run.name,
        again=AGAIN_SECONDS if run.standing.outcome == "going" else 0,
        settings=settings_line(run.config),
        standing=run.standing,
        figures=list(figures(run)),
        drawings=[draw(chart) for chart in run_charts(run)],
        tables=[table for table in tables if table is not None],
        config=run.config_text,
        summary=run.summary_text,
    )


def render(template: str, **values: Any) -> str:
    """Fill a template of the room."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(side=SIDE, **values)


def write_page(path: Path, page: str) -> None:
    """Replace a page; another process may be doing the same."""
    replace_text(path, page, temporary=f".{os.getpid()}.tmp")


def _changes(run: RunRead) -> Table | None:
    if not run.changes:
        return None
    columns = [Column("after step", is_number=True), Column("setting"), Column("before"), Column("since")]
    rows = [[Cell(str(change[key])) for key in ("step", "name", "old", "new")] for change in run.changes]
    return Table("Changed while the run went on", "", columns, rows)
