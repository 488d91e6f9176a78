"""Writes the page that compares several runs: curves over each other, what their configs differ in, evaluations.

Runs may have different lengths, metrics and evaluations: what a run lacks is left out, or a dash.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_grpo.observe.metrics.lines import Record, is_number, number_or_zero, numbers
from tpu_grpo.observe.report.charts import comparison_charts, evaluation_label, evaluation_lines, evaluation_names
from tpu_grpo.observe.report.drawing import COLOURS, draw
from tpu_grpo.observe.report.overview import best_name, median, reward_of, seconds_per_step, value_cell
from tpu_grpo.observe.report.page import render, write_page
from tpu_grpo.observe.report.reading import RunRead
from tpu_grpo.observe.report.tables import Cell, Column, Table, decimal, shorten

OWN_NAMES = ("run.name", "run.dir")
"""Settings that differ in any two runs."""
ABSENT = "–"
SHOWN_PROBLEMS = 4
Labelled = Sequence[tuple[str, RunRead]]


def write_comparison(runs: Sequence[RunRead], path: Path) -> Path:
    """Write the page as a whole or not at all, and return where it is."""
    write_page(path, comparison_page(runs))
    return path


def comparison_page(runs: Sequence[RunRead]) -> str:
    """Write the page of several runs as HTML."""
    labelled = list(zip(_labels(runs), runs, strict=True))
    tables = [_differences(labelled), _held_out(labelled)]
    going = any(run.standing.outcome == "going" for run in runs)
    return render(
        "comparison.html.jinja",
        title=f"Comparison of {len(runs)} runs",
        note=", ".join(label for label, _ in labelled) + (". Some still go on." if going else "."),
        again=0,
        overview=_overview(labelled),
        evaluation=_evaluations(labelled),
        drawings=[draw(chart) for chart in comparison_charts(labelled)],
        tables=[table for table in tables if table is not None],
    )


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Map every setting that is not the same in all configs to its value in each; a dash for one that has none.

    >>> differences([{"a": {"b": 1, "c": [2]}}, {"a": {"b": 1, "c": [2, 3]}}, {}])
    {'a.b': ['1', '1', '–'], 'a.c': ['[2]', '[2, 3]', '–']}
    """
    flat = [dict(_leaves(config)) for config in configs]
    names = dict.fromkeys(name for leaves in flat for name in leaves if name not in OWN_NAMES)
    values = {name: [leaves.get(name, ABSENT) for leaves in flat] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def _labels(runs: Sequence[RunRead]) -> list[str]:
    """Name runs apart: by their names, else by their directories' names, else by whole paths."""
    ways = ([run.name for run in runs], [run.directory.resolve().name for run in runs])
    return next((names for names in ways if max(Counter(names).values()) == 1), [str(run.directory) for run in runs])


def _overview(runs: Labelled) -> Table:
    columns = [Column("run"), Column("stands"), *(Column(name, is_number=True) for name in ("steps", *_FIGURES))]
    rows = []
    for number, (label, run) in enumerate(runs):
        steps = f"{run.standing.step:,} of {run.standing.max_steps or ABSENT}"
        figures = [Cell(figure(run)) for figure in _FIGURES.values()]
        standing = Cell(run.standing.outcome, run.standing.message if run.standing.outcome == "failed" else "")
        rows.append([Cell(label, colour=number % COLOURS), standing, Cell(steps), *figures])
    return Table("Runs", "", columns, rows)


def _reward(run: RunRead) -> str:
    return ABSENT if (found := reward_of(run.lines)) is None else f"{found.first:.3f} → {found.last:.3f}"


def _best(run: RunRead) -> str:
    records = evaluation_lines(run)
    values = numbers(records, best_name(run.config, records))
    return f"{values[0]:.3f} → {values[-1]:.3f}" if values else ABSENT


def _seconds(run: RunRead) -> str:
    return f"{median(found):.3g}" if (found := seconds_per_step(run.lines)) else ABSENT


def _speed(run: RunRead) -> str:
    return f"{median(found):,.0f}" if (found := numbers(run.lines, "rollout/tokens_per_second")) else ABSENT


_FIGURES = {
    "reward, first → last": _reward,
    "held out, first → last": _best,
    "seconds per step": _seconds,
    "tokens/s sampled": _speed,
}


def _evaluations(runs: Labelled) -> Table | None:
    """Show the last evaluation of every run beside each other; None without any."""
    records = [evaluation_lines(run) for _, run in runs]
    names = list(dict.fromkeys(name for found in records for name in evaluation_names(found)))
    if not names:
        return None
    deciding = {best_name(run.config, found) for (_, run), found in zip(runs, records, strict=True)}
    rows = []
    for name in names:
        last = [_last(found, name) for found in records]
        highest = max(record[name] for record in last if record is not None)
        rows.append(
            [
                Cell(evaluation_label(name)),
                *(
                    Cell(ABSENT)
                    if record is None
                    else value_cell(record, name, say_step=True, is_best=name in deciding and record[name] == highest)
                    for record in last
                ),
            ]
        )
    columns = [Column("held out"), *_run_columns(runs, is_number=True)]
    note = "The last one of each run, with 95 % intervals; in bold the highest of what decides which step is the best."
    return Table("Evaluation", note, columns, rows)


def _differences(runs: Labelled) -> Table:
    found = differences([run.config for _, run in runs])
    rows = [[Cell(name), *(Cell(shorten(value)) for value in values)] for name, values in found.items()]
    note = "" if found else "The configs are the same, but for names and directories."
    return Table("Settings that differ", note, [Column("setting"), *_run_columns(runs)], rows)


def _held_out(runs: Labelled) -> Table | None:
    """Show what each run completes the same held-out prompts to, at its last evaluation; first where rewards differ."""
    last = [{row["prompt"]: row for row in run.held_out[-1][1]} if run.held_out else {} for _, run in runs]
    shared = [prompt for prompt in last[0] if all(prompt in rows for rows in last)]
    if not shared:
        return None
    _, first = runs[0]
    reward = best_name(first.config, first.evaluations).rpartition("/")[2]
    groups = [[rows[prompt] for rows in last] for prompt in shared]
    groups.sort(key=lambda rows: len({number_or_zero(row["rewards"].get(reward)) for row in rows}) == 1)
    has_gold = any(row.get("gold") is not None for rows in groups for row in rows)
    cells = [
        [
            Cell(shorten(rows[0]["prompt"])),
            *([Cell(shorten(str(rows[0].get("gold", ABSENT))))] if has_gold else []),
            *(Cell(shorten(row["completion"]), f"{reward} {decimal(row['rewards'].get(reward))}") for row in rows),
        ]
        for rows in groups[:SHOWN_PROBLEMS]
    ]
    columns = [Column("prompt"), *([Column("right answer")] if has_gold else []), *_run_columns(runs)]
    return Table("Held-out prompts", "Greedy completions at the last evaluation of each run.", columns, cells)


def _run_columns(runs: Labelled, *, is_number: bool = False) -> list[Column]:
    return [Column(label, is_number, number % COLOURS) for number, (label, _) in enumerate(runs)]


def _last(records: Sequence[Record], name: str) -> Record | None:
    return next((record for record in reversed(records) if is_number(record.get(name))), None)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
