"""Chooses the range of an axis, and where its labels stand."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

Scale = Literal["linear", "zero", "share", "log"]
"""linear: around the values; zero: from 0 on; share: from 0 to 1; log: whole decades around positive values."""
X_LABELS, Y_LABELS = 6, 5
"""So many labels an axis has, about."""


@dataclass(frozen=True)
class Axis:
    """A range of values, drawn over the length of an axis."""

    low: float
    high: float
    is_log: bool = False

    def place(self, values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Say where values lie, from 0 at the low end to 1 at the high one; NaN for what a logarithm does not have."""
        low, high = self._scaled(np.array([self.low, self.high]))
        return (self._scaled(values) - low) / (high - low)

    def labels(self, about: int, *, whole: bool = False) -> list[tuple[float, str]]:
        """List places and texts of round values in the range; with ``whole``, of whole numbers."""
        if not self.is_log:
            step = round_step(max(whole, (self.high - self.low) / about))
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            values = [number * step for number in range(first, last + 1)]
            digits = max(0, -math.floor(math.log10(step)))
            texts = [_plain(value, digits, self.high) for value in values]
        else:
            low, high = round(math.log10(self.low)), round(math.log10(self.high))
            every = max(1, math.ceil((high - low) / about))
            values = [10.0**power for power in range(low, high + 1, every)]
            texts = [f"{value:.0e}" for value in values]
        return list(zip(self.place(np.array(values)).tolist(), texts, strict=True))

    def _scaled(self, values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        if not self.is_log:
            return values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(values > 0, np.log10(values), np.nan)


def steps_axis(low: float, high: float) -> Axis:
    """Span the steps; a single one stands in the middle."""
    return Axis(low, high) if high > low else Axis(low - 0.5, high + 0.5)


def values_axis(values: Float[np.ndarray, " N"], scale: Scale) -> Axis:
    """Span values as the scale says; without any, from 0 to 1."""
    known = values[np.isfinite(values)]
    if scale == "share":
        return Axis(0.0, 1.0)
    if scale == "log" and (known > 0).any():
        known = known[known > 0]
        low, high = math.floor(math.log10(known.min())), math.ceil(math.log10(known.max()))
        return Axis(10.0**low, 10.0 ** max(high, low + 1), is_log=True)
    if not len(known):
        return Axis(0.0, 1.0)
    low, high = float(known.min()), float(known.max())
    if scale in ("zero", "log") and low >= 0:
        return Axis(0.0, 1.06 * high or 1.0)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return Axis(low - margin, high + margin)


def round_step(least: float) -> float:
    """Return the first of 1, 2, 5, 10, 20, ... and their tenths that is not below ``least``.

    >>> round_step(0.13), round_step(3.0), round_step(10.0)
    (0.2, 5.0, 10.0)
    """
    power = math.floor(math.log10(least))
    return next(f * 10.0**power for f in (1.0, 2.0, 5.0, 10.0) if f * 10.0**power >= least * (1 - 1e-9))


def _plain(value: float, digits: int, high: float) -> str:
    """Write a label: with separators where it is long, with a power of ten where it is tiny or huge."""
    if digits > 4 or abs(high) >= 1e7:
        return f"{value:.1e}" if value else "0"
    return f"{value + 0.0:,.{digits}f}"
