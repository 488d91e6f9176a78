"""Reads what a run left, or has left so far: any file may be missing, and a metric may be missing in any line."""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import yaml

from tpu_grpo.config.yaml_dialect import Loader
from tpu_grpo.observe.metrics.jsonl import read_records
from tpu_grpo.observe.metrics.lines import Lines, Record
from tpu_grpo.observe.metrics.run_files import (
    CHANGES_FILE,
    CONFIG_FILE,
    END_FILE,
    EVALUATION_FILE,
    EVALUATIONS_DIR,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
)
from tpu_grpo.observe.report.standing import Standing, standing_of
from tpu_grpo.records.errors import DataError

MOST_ROWS = 256
"""So many completions of a step are read: its best and its worst are those of the first ones."""
MOST_PROBLEMS = 64
"""So many held-out prompts of an evaluation are read."""
Rows = Sequence[Record]


@dataclass(frozen=True)
class RunRead:
    """What is known of a run."""

    directory: Path
    name: str
    standing: Standing
    lines: Lines
    """Of ``metrics.jsonl``."""
    evaluations: Lines
    """Of ``evaluation.jsonl``."""
    changes: Lines
    config: Mapping[str, Any]
    config_text: str
    summary_text: str
    samples: tuple[Rows, ...]
    """The rows of the first, a middle and the last logged step; fewer where there are fewer."""
    held_out: tuple[tuple[int, Rows], ...]
    """Step and greedy completions of the first and the last evaluation; one, or none, where there are fewer."""


def read_run(directory: Path, *, goes_on: bool = False, standing: Standing | None = None) -> RunRead:
    """Read the directory of a run.

    Args:
        directory: the run's.
        goes_on: whether a process has the directory.
        standing: how the run stands, for whoever knows it better than the files.

    Raises:
        DataError: for a directory that is no run's, and for a file that is not what it should be.
    """
    if not any((directory / name).is_file() for name in (CONFIG_FILE, METRICS_FILE)):
        raise DataError(
            f"a report needs the directory of a run (run.dir), which holds {CONFIG_FILE} and {METRICS_FILE}; "
            f"{directory} {'holds neither' if directory.is_dir() else 'is no directory'}"
        )
    lines = list(read_records(directory / METRICS_FILE, missing_ok=True))
    evaluations = list(read_records(directory / EVALUATION_FILE, missing_ok=True))
    config_text = _text(directory / CONFIG_FILE)
    config = _config(directory / CONFIG_FILE, config_text)
    run = section if isinstance(section := config.get("run"), dict) else {}
    summary_text = _text(directory / SUMMARY_FILE)
    if standing is None:
        step = lines[-1]["step"] if lines else 0
        summary, end = _object(summary_text), _object(_text(directory / END_FILE))
        standing = standing_of(end, summary, step, run.get("max_steps"), goes_on=goes_on)
    return RunRead(
        directory=directory,
        name=str(run.get("name") or directory.resolve().name),
        standing=standing,
        lines=lines,
        evaluations=evaluations,
        changes=list(read_records(directory / CHANGES_FILE, missing_ok=True)),
        config=config,
        config_text=config_text,
        summary_text=summary_text,
        samples=tuple(read_samples(directory / SAMPLES_FILE)),
        held_out=tuple(_held_out(directory / EVALUATIONS_DIR, evaluations)),
    )


def read_samples(path: Path) -> list[Rows]:
    """Read the rows of the first, a middle and the last logged step, by jumps: the file may have gigabytes.

    Raises:
        DataError: for a line among them that is no JSON object.
    """
    if not path.is_file():
        return []
    steps = _StepFile(path)
    first = steps.at(0)
    last = steps.last()
    if first is None or last is None:
        return []
    middle = steps.at(steps.begin((first + last) // 2))
    wanted = sorted({first, last if middle is None else middle, last})
    return [rows for step in wanted if (rows := steps.rows(step))]


class _StepFile:
    """A file of lines with ascending steps, ``{"step": 3, ...``, in which a step is found by bisection."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = path.stat().st_size

    def at(self, offset: int) -> int | None:
        """Return the step of the first whole line that begins at ``offset`` or after it; None for none."""
        with self._path.open("rb") as file:
            if offset:
                file.seek(offset - 1)
                file.readline()
            line = file.readline()
        if not line.endswith(b"\n"):
            return None
        step = _object(line).get("step")
        if not isinstance(step, int):
            raise DataError(f"{self._path} must hold a JSON object with a step on every line, got {line[:60]!r}")
        return step

    def begin(self, step: int) -> int:
        """Return an offset at or before which the first line of ``step`` or a later one begins."""
        return bisect_left(
            range(self._size), step, key=lambda offset: math.inf if (at := self.at(offset)) is None else at
        )

    def last(self) -> int | None:
        """Return the last step; None without one."""
        end = bisect_left(range(self._size), True, key=lambda offset: self.at(offset) is None)
        return self.at(end - 1) if end else None

    def rows(self, step: int) -> Rows:
        """Read the first rows of a step."""
        with self._path.open("rb") as file:
            if offset := self.begin(step):
                file.seek(offset - 1)
                file.readline()
            found = (_object(line) for line in file if line.endswith(b"\n"))
            return list(islice(takewhile(lambda row: row.get("step") == step, found), MOST_ROWS))


def _held_out(directory: Path, evaluations: Lines) -> list[tuple[int, Rows]]:
    steps = sorted({record["step"] for record in evaluations})
    found = []
    for step in sorted({*steps[:1], *steps[-1:]}):
        rows = list(islice(read_records(directory / f"{step}.jsonl", missing_ok=True), MOST_PROBLEMS))
        found.append((step, [row for row in rows if row.get("mode") == "greedy"]))
    return [(step, rows) for step, rows in found if rows]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _object(text: str | bytes) -> dict[str, Any]:
    """Read a JSON object; what is none, such as a file that is being written, is empty."""
    try:
        found = json.loads(text)
    except ValueError:  # both a JSON and a UTF-8 error
        return {}
    return found if isinstance(found, dict) else {}


def _config(path: Path, text: str) -> dict[str, Any]:
    try:
        config = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise DataError(f"{path} must be YAML ({error}); remove or mend it") from error
    return config if isinstance(config, dict) else {}
