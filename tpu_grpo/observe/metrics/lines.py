"""Reads values back from the lines of ``metrics.jsonl`` and its kin, in which any name may be missing or null."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Float

Record = Mapping[str, Any]
Lines = Sequence[Record]


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value is a number; null, texts and truth values are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_or_zero(value: object) -> float:
    """Return the number that ``value`` is, or 0 where it is none."""
    return float(value) if is_number(value) else 0.0


def numbers(lines: Iterable[Record], name: str) -> list[float]:
    """Collect a metric's values, in order, from the lines in which it is a number."""
    return [float(line[name]) for line in lines if is_number(line.get(name))]


def series(lines: Lines, name: str) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Return steps and values of a metric over the N lines that name it; a null value is NaN, which leaves a gap."""
    points = [(line["step"], line[name]) for line in lines if name in line]
    return (
        np.array([step for step, _ in points], np.float64),
        np.array([value if is_number(value) else np.nan for _, value in points], np.float64),
    )


def names_in(records: Iterable[Record]) -> list[str]:
    """List every name that occurs in any of the records, in the order in which they first appear.

    >>> names_in([{"a": 1, "b": 2}, {"c": 3, "a": 4}])
    ['a', 'b', 'c']
    """
    return list(dict.fromkeys(name for record in records for name in record))
