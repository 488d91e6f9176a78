"""Writes the page that compares several runs: their curves, their evaluations, and the settings that differ.

Runs may differ in length, metrics and evaluations: what a run lacks is left out, or shown as a dash.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tpu_grpo.observe.chart_drawing import COLOURS, draw
from tpu_grpo.observe.charts import Labelled, comparison_charts, evaluation_label, evaluation_lines, evaluation_names
from tpu_grpo.observe.json_lines import is_number, number_or_zero, numbers
from tpu_grpo.observe.page_tables import Cell, Column, Table, best_name, decimal, shorten, value_cell
from tpu_grpo.observe.run_page import median_seconds, median_speed, reward_of, write_page
from tpu_grpo.observe.run_reader import ABSENT, RunRead, differences
from tpu_grpo.observe.sample_rows import without_marks

SHOWN_PROBLEMS = 4


def write_comparison(runs: Sequence[RunRead], path: Path) -> Path:
    """Write the page that compares the runs to ``path``, atomically; returns ``path``."""
    labelled = list(zip(_labels(runs), runs, strict=True))
    tables = [_differences(labelled), _held_out(labelled)]
    going = any(run.standing.outcome == "going" for run in runs)
    write_page(
        path,
        "comparison.html.jinja",
        title=f"Comparison of {len(runs)} runs",
        note=", ".join(label for label, _ in labelled) + (". Some still go on." if going else "."),
        again=0,
        overview=_overview(labelled),
        evaluation=_evaluations(labelled),
        drawings=[draw(chart) for chart in comparison_charts(labelled)],
        tables=[table for table in tables if table is not None],
    )
    return path


def _labels(runs: Sequence[RunRead]) -> list[str]:
    """Return distinct labels: the runs' names, or if these are not distinct, their directories' names or paths."""
    ways = ([run.name for run in runs], [run.directory.resolve().name for run in runs])
    return next((names for names in ways if max(Counter(names).values()) == 1), [str(run.directory) for run in runs])


def _overview(runs: Labelled) -> Table:
    heads = ("steps", "reward, first → last", "held out, first → last", "seconds per step", "tokens/s sampled")
    rows = []
    for number, (label, run) in enumerate(runs):
        standing, records, reward = run.standing, evaluation_lines(run), reward_of(run.lines)
        held_out = numbers(records, best_name(run.config, records))
        figures = (
            f"{standing.step:,} of {standing.max_steps or ABSENT}",
            f"{reward.first:.3f} → {reward.last:.3f}" if reward else ABSENT,
            f"{held_out[0]:.3f} → {held_out[-1]:.3f}" if held_out else ABSENT,
            median_seconds(run.lines) or ABSENT,
            median_speed(run.lines) or ABSENT,
        )
        outcome = Cell(standing.outcome, standing.message if standing.outcome == "failed" else "")
        rows.append([Cell(label, colour=number % COLOURS), outcome, *map(Cell, figures)])
    columns = [Column("run"), Column("stands"), *(Column(head, is_number=True) for head in heads)]
    return Table("Runs", "", columns, rows)


def _evaluations(runs: Labelled) -> Table | None:
    """Make a table of each run's last evaluation, with a column per run; None if no run has one."""
    records = [evaluation_lines(run) for _, run in runs]
    names = list(dict.fromkeys(name for found in records for name in evaluation_names(found)))
    if not names:
        return None
    deciding = {best_name(run.config, found) for (_, run), found in zip(runs, records, strict=True)}
    rows = []
    for name in names:
        last = [next((one for one in reversed(found) if is_number(one.get(name))), None) for found in records]
        highest = max(record[name] for record in last if record is not None)
        cells = [
            Cell(ABSENT)
            if record is None
            else value_cell(record, name, say_step=True, is_best=name in deciding and record[name] == highest)
            for record in last
        ]
        rows.append([Cell(evaluation_label(name)), *cells])
    columns = [Column("held out"), *_run_columns(runs, is_number=True)]
    note = "The last one of each run, with 95 % intervals; in bold the highest of what decides which step is the best."
    return Table("Evaluation", note, columns, rows)


def _differences(runs: Labelled) -> Table:
    found = differences([run.config for _, run in runs])
    rows = [[Cell(name), *(Cell(shorten(value)) for value in values)] for name, values in found.items()]
    note = "" if found else "The configs are the same, but for names and directories."
    return Table("Settings that differ", note, [Column("setting"), *_run_columns(runs)], rows)


def _held_out(runs: Labelled) -> Table | None:
    """Make a table of the runs' last completions of the held-out prompts that all runs have; None if there are none.

    Prompts with unequal rewards come first.
    """
    last = [{row["prompt"]: row for row in run.held_out[-1][1]} if run.held_out else {} for _, run in runs]
    shared = [prompt for prompt in last[0] if all(prompt in rows for rows in last)]
    if not shared:
        return None
    _, first = runs[0]
    reward = best_name(first.config, first.evaluations).rpartition("/")[2]
    groups = [[rows[prompt] for rows in last] for prompt in shared]
    groups.sort(key=lambda rows: len({number_or_zero(row["rewards"].get(reward)) for row in rows}) == 1)
    gold = ["right answer"] if any(row.get("gold") is not None for rows in groups for row in rows) else []
    cells = [
        [
            Cell(shorten(without_marks(rows[0]["prompt"]))),
            *(Cell(shorten(str(rows[0].get("gold", ABSENT)))) for _ in gold),
            *(Cell(shorten(row["completion"]), f"{reward} {decimal(row['rewards'].get(reward))}") for row in rows),
        ]
        for rows in groups[:SHOWN_PROBLEMS]
    ]
    columns = [*map(Column, ("prompt", *gold)), *_run_columns(runs)]
    return Table("Held-out prompts", "Greedy completions at the last evaluation of each run.", columns, cells)


def _run_columns(runs: Labelled, *, is_number: bool = False) -> list[Column]:
    return [Column(label, is_number, number % COLOURS) for number, (label, _) in enumerate(runs)]
