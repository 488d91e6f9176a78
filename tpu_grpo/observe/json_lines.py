"""The records of a run's JSON-lines files in memory: their numbers by name, and a compact form."""

import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Float

from tpu_grpo.records.json_files import Record

Lines = Sequence[Record]


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
