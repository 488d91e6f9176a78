"""Compares the times of a run with a plan: plan.json in run.dir, or the plan that `tpu-grpo check` made for the run."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tpu_grpo.observe.json_lines import Lines, is_number, numbers
from tpu_grpo.observe.run_files import plan_of
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.untrusted_input import parse_json, read_file
from tpu_grpo.report.page_tables import Cell, Column, Table

STAGES = {
    "decode_step": ("decode", "rollout/decode_step_seconds", 1e3, "ms a step"),
    "rollout": ("rollout", "rollout/seconds", 1.0, "s"),
    "update": ("update", "update/seconds", 1.0, "s"),
    "sync": ("weight sync", "weights/sync_seconds", 1.0, "s"),
}
"""Name in a plan -> (label, name of the run's metric, factor from seconds to the unit shown, unit)."""


class Beside(NamedTuple):
    """A stage's time in the run and its planned time, both in ``unit``."""

    label: str
    own: float
    """The run's time: the median over its steps."""
    planned: float
    unit: str

    def __str__(self) -> str:
        return f"{self.label} {self.own:.3g} {self.unit}, planned {self.planned:.3g}"


def read_planned(run_dir: Path) -> dict[str, float]:
    """Read a run's planned seconds, by the names in STAGES; empty without a plan.

    Raises:
        DataError: the file does not hold planned seconds.
    """
    if (path := plan_of(run_dir)) is None:
        return {}
    try:
        planned = parse_json(read_file(path))["planned"]
        return {name: float(value) for name, value in planned.items() if name in STAGES}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} must hold planned seconds, got {error!r}; write it again, or remove it") from error


def beside_plan(lines: Lines, planned: Mapping[str, float]) -> Iterator[Beside]:
    """Compare a run's times with its plan. The first step, which compiles, is left out if there are others."""
    for name, (label, metric, factor, unit) in STAGES.items():
        values = numbers(lines[1:] or lines, metric)
        if values and is_number(planned.get(name)):
            yield Beside(label, factor * median(values), factor * planned[name], unit)


def note_of(run_dir: Path) -> Callable[[Mapping[str, Any]], str]:
    """Read a run's plan, and return a function that says how a step's times, from its metrics, compare with it."""
    planned = read_planned(run_dir)
    return lambda line: "; ".join(map(str, beside_plan([line], planned)))


def plan_table(lines: Lines, planned: Mapping[str, float]) -> Table | None:
    """Make the report's table of a run's times and the planned ones; None without a plan."""
    columns = [Column("stage"), Column("median", is_number=True), Column("planned", is_number=True), Column("unit")]
    rows = [
        [Cell(b.label), Cell(f"{b.own:.3g}"), Cell(f"{b.planned:.3g}"), Cell(b.unit)]
        for b in beside_plan(lines, planned)
    ]
    note = "A plan is for completions of the longest length, unless it was told their mean."
    return Table("Beside the plan", note, columns, rows) if rows else None
