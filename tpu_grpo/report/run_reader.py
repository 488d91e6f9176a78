"""Reads the files that a run has written so far, and its state: going on, done, stopped, failed or gone.

Any file may be missing, and so may a metric in any line.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import yaml

from tpu_grpo.config.yaml_dialect import read_yaml
from tpu_grpo.observe.json_lines import Lines, compact
from tpu_grpo.observe.run_files import (
    CHANGES_FILE,
    CONFIG_FILE,
    END_FILE,
    EVALUATION_FILE,
    EVALUATIONS_DIR,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
)
from tpu_grpo.observe.standing import Standing, now
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.json_files import Record, read_records, read_steps
from tpu_grpo.records.untrusted_input import parse_json, read_file

MOST_ROWS = 256
"""The most completions of a step that are read; the page shows the best and the worst of these."""
MOST_PROBLEMS = 64
"""The most held-out prompts of an evaluation that are read."""
Rows = Sequence[Record]
OWN_NAMES = ("run.name", "run.dir")
"""Settings that differ in any two runs."""
ABSENT = "–"
"""The text for a missing value."""


def standing_of(
    end: Mapping[str, Any], summary: Mapping[str, Any], step: int, max_steps: int | None, *, goes_on: bool
) -> Standing:
    """Return the state of a run from its files; ``goes_on`` says whether a process uses its directory.

    ``end`` and ``summary`` are the contents of ``end.json`` and ``summary.json``, empty without these files. A run
    without ``end.json`` (of an older version) is done if its summary has the last step. ``step`` is the last step in
    ``metrics.jsonl``.
    """
    going = Standing("going", step, max_steps, at=now())
    if goes_on:
        return going
    if end.get("outcome") in ("done", "stopped", "failed"):
        return replace(going, **{name: end[name] for name in ("outcome", "message", "exit_code", "at") if name in end})
    if summary and summary.get("steps") == step:
        return replace(going, outcome="done", message=str(summary.get("ended_early") or ""), at="")
    return replace(going, outcome="gone", at="")


@dataclass(frozen=True)
class RunRead:
    """The contents of a run's files."""

    directory: Path
    name: str
    standing: Standing
    lines: Lines
    """The lines of ``metrics.jsonl``."""
    evaluations: Lines
    """The lines of ``evaluation.jsonl``."""
    changes: Lines
    config: Mapping[str, Any]
    config_text: str
    summary_text: str
    samples: tuple[Rows, ...]
    """The rows of the first, a middle and the last logged step, or of fewer steps if fewer were logged."""
    held_out: tuple[tuple[int, Rows], ...]
    """Step and greedy completions of the first and the last evaluation, or of the only one; empty without any."""


def read_run(directory: Path, *, goes_on: bool = False, standing: Standing | None = None) -> RunRead:
    """Read the directory of a run.

    ``goes_on`` says whether a process uses the directory. ``standing`` is the state of the run, if the caller knows it;
    otherwise it is taken from the files.

    Raises:
        DataError: for a directory that is not a run's, or a malformed file.
    """
    if not any((directory / name).is_file() for name in (CONFIG_FILE, METRICS_FILE)):
        raise DataError(
            f"a report needs the directory of a run (run.dir), which holds {CONFIG_FILE} and {METRICS_FILE}; "
            f"{directory} {'holds neither' if directory.is_dir() else 'is no directory'}"
        )

    def text(name: str) -> str:
        path = directory / name
        return read_file(path).decode(errors="replace") if path.is_file() else ""

    lines, evaluations = compact(read_steps(directory / METRICS_FILE)), list(read_steps(directory / EVALUATION_FILE))
    changes = list(read_steps(directory / CHANGES_FILE, name=str, old=str, new=str, effect=str))
    config_text, summary_text = text(CONFIG_FILE), text(SUMMARY_FILE)
    try:
        config = read_yaml(config_text)
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{directory / CONFIG_FILE} must be YAML ({error}); remove or mend it") from error
    config = config if isinstance(config, dict) else {}
    if standing is None:
        step = lines[-1]["step"] if lines else 0
        end = _object(text(END_FILE))
        max_steps = setting_of(config, "run", "max_steps")
        standing = standing_of(end, _object(summary_text), step, max_steps, goes_on=goes_on)
    return RunRead(
        directory=directory,
        name=str(setting_of(config, "run", "name") or directory.resolve().name),
        standing=standing,
        lines=lines,
        evaluations=evaluations,
        changes=changes,
        config=config,
        config_text=config_text,
        summary_text=summary_text,
        samples=tuple(read_samples(directory / SAMPLES_FILE)),
        held_out=tuple(_held_out(directory / EVALUATIONS_DIR, evaluations)),
    )


def setting_of(config: Mapping[str, Any], section: str, name: str) -> Any:
    """Return the value of a setting; None if the config lacks it, for example because its version is older."""
    found = config.get(section)
    return found.get(name) if isinstance(found, dict) else None


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Map every setting that differs between configs to its value in each; a dash stands for a missing value.

    >>> differences([{"a": {"b": 1, "c": [2]}}, {"a": {"b": 1, "c": [2, 3]}}, {}])
    {'a.b': ['1', '1', '–'], 'a.c': ['[2]', '[2, 3]', '–']}
    """
    flat = [dict(_leaves(config)) for config in configs]
    names = dict.fromkeys(name for leaves in flat for name in leaves if name not in OWN_NAMES)
    values = {name: [leaves.get(name, ABSENT) for leaves in flat] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_samples(path: Path) -> list[Rows]:
    """Read the rows of the first, a middle and the last logged step by seeking, because the file may have gigabytes.

    Raises:
        DataError: for a line that is read in this search and has no ``step``.
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
        """Return the step of the first whole line that begins at or after ``offset``; None if there is none."""
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
        """Return the lowest byte offset from which on every complete line has ``step`` or a later step."""
        return bisect_left(
            range(self._size), step, key=lambda offset: math.inf if (at := self.at(offset)) is None else at
        )

    def last(self) -> int | None:
        """Return the last step; None for an empty file."""
        end = bisect_left(range(self._size), True, key=lambda offset: self.at(offset) is None)
        return self.at(end - 1) if end else None

    def rows(self, step: int) -> Rows:
        """Read the first ``MOST_ROWS`` rows of a step."""
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


def _object(text: str | bytes) -> dict[str, Any]:
    """Read a JSON object; return an empty object for any other text, such as that of a file being written."""
    try:
        found = parse_json(text)
    except ValueError:  # both a JSON and a UTF-8 error
        return {}
    return found if isinstance(found, dict) else {}
