"""Putting together the figures that several hosts have about their shares of a step.

share = encode_figures(scores.figures)                  # each host; plain lists, fit for JSON
figures = merge_figures(shares)                         # all of them, the same everywhere
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tpu_grpo.types import Figure

type Encoded = Mapping[str, list[Any]]


def encode_figures(figures: Mapping[str, Figure]) -> dict[str, list[Any]]:
    """Name -> [value, how to merge, count]."""
    return {name: [figure.value, figure.merge, figure.count] for name, figure in figures.items()}


def merge_figures(shares: Iterable[Encoded]) -> dict[str, Figure]:
    """One figure per name: sums added, means weighed by their counts, the largest maximum.

    A mean of 2 over 1 value and a mean of 5 over 2 values make a mean of 4 over 3.
    """
    merged: dict[str, Figure] = {}
    for share in shares:
        for name, (value, how, count) in share.items():
            new = Figure(value, how, count)
            merged[name] = _merged(merged[name], new) if name in merged else new
    return merged


def _merged(a: Figure, b: Figure) -> Figure:
    count = a.count + b.count
    match a.merge:
        case "sum":
            return Figure(a.value + b.value, "sum", count)
        case "max":
            return Figure(max(a.value, b.value), "max", count)
        case "mean":
            return Figure((a.value * a.count + b.value * b.count) / count, "mean", count)
