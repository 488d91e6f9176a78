"""Reading records: a .jsonl file, or the built-in task."""

import json
import random
from pathlib import Path
from typing import Any, Literal

from tpu_grpo.config import BUILTIN
from tpu_grpo.errors import DataError
from tpu_grpo.tasks import addition

ADDITION = f"{BUILTIN}addition"


def read_records(
    path: str, split: Literal["train", "heldout"] = "train", *, setting: str = "data.path"
) -> list[dict[str, Any]]:
    """All records of a .jsonl file (one JSON object per line, all with the same keys) or of ``builtin:addition``.

    ``split`` chooses between the built-in task's problems; a file has no splits. ``setting`` is where the path was
    given, for errors.

    Raises:
        DataError: for a file that is missing, empty or not UTF-8, or a line that does not fit; names file and line.
    """
    if path == ADDITION:
        return _addition(split)
    if path.startswith(BUILTIN):
        raise DataError(f"{setting}: the only built-in data is {ADDITION}, got {path!r}")
    return _read_jsonl(Path(path).expanduser(), setting)


def _addition(split: Literal["train", "heldout"]) -> list[dict[str, Any]]:
    """The task's problems; held-out ones in a fixed shuffled order.

    They come sorted by their first number, and small numbers carry less often: of the first half in that order 60 %
    need a carry, of all 73 %. An evaluation that takes the first few would measure an easier task.
    """
    records: list[dict[str, Any]] = [dict(problem) for problem in addition.problems(split)]
    if split == "heldout":
        random.Random(0).shuffle(records)  # 0: the same for every run
    return records


def _read_jsonl(path: Path, setting: str) -> list[dict[str, Any]]:
    if path.suffix != ".jsonl":
        raise DataError(f"{setting} must be a .jsonl file (one JSON object per line) or {ADDITION}, got {path}")
    try:
        with path.open(encoding="utf-8-sig") as file:  # with or without a byte-order mark
            lines = list(file)
    except FileNotFoundError:
        raise DataError(f"{setting}: data file not found: {path} (relative to {Path.cwd()}); correct it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{setting}: {path} must be readable UTF-8, got {type(error).__name__}: {error}") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise DataError(f"{setting}: {path} must hold at least one record, got none; write one JSON object a line")
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    for number, record in enumerate(records, start=1):
        _check_keys(record, records[0], f"{path}:{number}")
    return records


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        what = "an empty line" if not line.strip() else f"{error.msg} at column {error.colno}"
        raise DataError(f"{where} must be a JSON object, got {what}") from None
    if not isinstance(record, dict) or not record:
        got = "an empty one" if record == {} else f"a {type(record).__name__}"
        raise DataError(f"{where} must be a JSON object with a key per column, got {got}")
    return record


def _check_keys(record: dict[str, Any], first: dict[str, Any], where: str) -> None:
    if record.keys() == first.keys():
        return
    lacking, extra = sorted(first.keys() - record.keys()), sorted(record.keys() - first.keys())
    found = " and ".join(part for part in (f"lacks {lacking}" * bool(lacking), f"adds {extra}" * bool(extra)) if part)
    raise DataError(f"{where} must have the keys of line 1, {list(first)}, but {found}; write null where there is none")
