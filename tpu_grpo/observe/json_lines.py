"""Writes and reads the files of a run: JSON-lines files, which grow by lines, and files that are replaced as a whole.

A kill breaks at most the last line of a JSON-lines file. In a record any name may be missing, or have the value null.
"""

import errno
import json
import math
import os
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Float

from tpu_grpo.records.errors import DataError
from tpu_grpo.records.outside import lines_of, open_file, parse_json

Record = Mapping[str, Any]
Lines = Sequence[Record]


def encode_line(record: Record) -> bytes:
    """Encode one record as a line of JSON, newline included.

    NaN and infinities, which JSON does not have, become null. A lone surrogate in a text is written as its escape,
    so that the file stays UTF-8 and the text still reads back as it was.
    """
    text = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def jsonable(value: Any) -> Any:
    """Convert numpy scalars to Python's, and numbers that are not finite to None, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def keep_steps(path: Path, last: int) -> None:
    """Rewrite a file atomically with only the records of steps up to ``last``; a missing file stays missing.

    If the last line is torn (cut off by a kill) and may belong to one of these steps, print that this line is lost.

    Raises:
        DataError: for a malformed line, as in `read_steps`; the file is then unchanged.
    """
    if not path.exists():
        return
    torn: list[bytes] = []
    replace_bytes(path, (encode_line(record) for record in read_steps(path, torn) if record["step"] <= last))
    for line in torn:
        found = re.match(rb'{"step": ?(\d{1,18})\D', line)
        if found is None or int(found[1]) <= last:
            of = f" of step {int(found[1])}" if found else ""
            print(f"{path}: its last line{of} was torn, as by a full disk, and is lost", file=sys.stderr, flush=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value atomically as indented JSON; numbers that are not finite become null."""
    replace_text(path, json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_text(path: Path, text: str, temporary: str = ".tmp") -> None:
    """Write a UTF-8 file atomically; see ``replace_bytes``."""
    replace_bytes(path, [text.encode("utf-8", errors="backslashreplace")], temporary)


def replace_bytes(path: Path, data: Iterable[bytes], temporary: str = ".tmp") -> None:
    """Write a file atomically: a reader sees either the old file or the complete new file.

    Until the new file is complete, its name ends in ``temporary``; concurrent writers need different endings.
    """
    unfinished = path.with_name(path.name + temporary)
    with unfinished.open("wb") as file:
        file.writelines(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read_records(path: Path, *, missing_ok: bool = False, torn: list[bytes] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, in order. A last line that a kill cut off is appended to ``torn`` instead.

    With ``missing_ok`` a missing file has no records.

    Raises:
        DataError: for any other line that is not a JSON object.
    """
    if missing_ok and not path.exists():
        return
    try:
        opened = open_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EISDIR, errno.ELOOP):
            raise
        raise DataError(f"{path} must be a file of JSON objects, one a line, got {error}; remove it") from error
    with opened as file:
        for number, line in enumerate(lines_of(file, str(path)), start=1):
            try:
                record = parse_json(line)
            except ValueError:  # both a JSON and a UTF-8 error
                record = None
            if isinstance(record, dict):
                yield record
            elif file.read(1):
                raise DataError(
                    f"{path}:{number} must be one JSON object, got {line[:60]!r}; only the last line may be torn: "
                    "remove this line, or the file"
                )
            elif torn is not None:
                torn.append(line)


def read_steps(path: Path, torn: list[bytes] | None = None, **types: type) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, in which ``step`` must be an int and every name in ``types`` of the given type.

    Raises:
        DataError: as ``read_records`` does, and for a line in which one of these names is missing or has another type.
    """
    for record in read_records(path, missing_ok=True, torn=torn):
        for name, kind in {"step": int, **types}.items():
            if type(value := record.get(name)) is not kind:
                raise DataError(
                    f"{path}: every line must hold {name}, a value of {kind.__name__}, got {value!r}; restore or "
                    "remove the file"
                )
        yield record


class CompactRecord(Record):
    """A record that stores each number in 8 bytes; records with the same names and types share one table of names.

    To write the page of a long run, all lines of its metrics are in memory. As dicts they would take 10 KB a step.
    """

    __slots__ = ("_numbers", "_others", "_places")

    def __init__(self, places: Mapping[str, tuple[type, int]], numbers: "array[float]", others: tuple[Any, ...]):
        self._places, self._numbers, self._others = places, numbers, others

    def __getitem__(self, name: str) -> Any:
        kind, place = self._places[name]
        return self._others[place] if kind is object else kind(self._numbers[place])

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def compact(records: Iterable[Record]) -> list[CompactRecord]:
    """Convert records to `CompactRecord`, in which integers that a float would round remain Python integers."""
    forms: dict[tuple[tuple[str, type], ...], dict[str, tuple[type, int]]] = {}
    made = []
    for record in records:
        kinds = {name: _stored_as(value) for name, value in record.items()}
        numbers = array("d", [value for name, value in record.items() if kinds[name] is not object])
        others = tuple(value for name, value in record.items() if kinds[name] is object)
        if (places := forms.get(form := tuple(kinds.items()))) is None:
            places, counts = forms.setdefault(form, {}), Counter[bool]()
            for name, kind in form:
                places[name] = (kind, counts[kind is object])
                counts[kind is object] += 1
        made.append(CompactRecord(places, numbers, others))
    return made


def _stored_as(value: object) -> type:
    return type(value) if type(value) is float or (type(value) is int and abs(value) <= 2**53) else object


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number; null, texts, booleans and integers that no float can hold are not."""
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return whole or isinstance(value, float)


def number_or_zero(value: object) -> float:
    """Return ``value`` if it is a number, else 0."""
    return float(value) if is_number(value) else 0.0


def numbers(lines: Iterable[Record], name: str) -> list[float]:
    """Return a metric's values, in order, from the lines in which it is a number."""
    return [float(line[name]) for line in lines if is_number(line.get(name))]


def series(lines: Lines, name: str) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Return steps and values of a metric over the N lines that have it; null becomes NaN, a gap in a chart."""
    points = [(line["step"], line[name]) for line in lines if name in line]
    return (
        np.array([step for step, _ in points], np.float64),
        np.array([value if is_number(value) else np.nan for _, value in points], np.float64),
    )


def interval_of(record: Record, name: str) -> tuple[float, float]:
    """Return the 95 % interval of a metric from a line of ``evaluation.jsonl``; (NaN, NaN) if the line lacks it."""
    intervals = record.get("intervals")
    bounds = intervals.get(name.removeprefix("evaluation/")) if isinstance(intervals, dict) else None
    known: Sequence[object] = bounds if isinstance(bounds, list) and len(bounds) > 1 else (None, None)
    low, high = (float(value) if is_number(value := known[end]) else math.nan for end in (0, 1))
    return low, high


def names_in(records: Iterable[Record]) -> list[str]:
    """Return every name in any of the records, in the order of first appearance.

    >>> names_in([{"a": 1, "b": 2}, {"c": 3, "a": 4}])
    ['a', 'b', 'c']
    """
    return list(dict.fromkeys(name for record in records for name in record))
