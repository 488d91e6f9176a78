"""Keeps few of many points, so that a page of 20,000 steps stays small, and no peak is lost; and smooths many."""

import numpy as np
from jaxtyping import Float, Int

BUCKETS = 400
"""A line keeps at most twice as many points: the lowest and the highest of each bucket of steps."""


def kept(values_N: Float[np.ndarray, " N"], buckets: int = BUCKETS) -> Int[np.ndarray, " K"]:
    """Return the places of the points that are kept, ascending: all of few, else the extremes of each bucket.

    The first and the last point are always kept. Where a bucket holds a gap (NaN), its first one is kept, too.

    >>> kept(np.array([1.0, 5.0, 2.0, 3.0, 0.0, 4.0, 9.0, 9.0]), 2).tolist()
    [0, 1, 4, 6, 7]
    """
    if len(values_N) <= 2 * buckets:
        return np.arange(len(values_N))
    found = {0, len(values_N) - 1}
    gaps_N = np.isnan(values_N)
    low_N, high_N = np.where(gaps_N, np.inf, values_N), np.where(gaps_N, -np.inf, values_N)
    for places in np.array_split(np.arange(len(values_N)), buckets):
        here = slice(places[0], places[-1] + 1)
        if (gaps := gaps_N[here]).any():
            found.add(int(places[gaps.argmax()]))
        if not gaps.all():
            found |= {int(places[low_N[here].argmin()]), int(places[high_N[here].argmax()])}
    return np.array(sorted(found))


def moving_mean(values_N: Float[np.ndarray, " N"], window: int) -> Float[np.ndarray, " N"]:
    """Average the known values in a window around each point, of which there is less at the ends; NaN where none is.

    >>> moving_mean(np.array([0.0, 3.0, np.nan, 5.0]), 3).tolist()
    [1.5, 1.5, 4.0, 5.0]
    """
    known_N, ones = ~np.isnan(values_N), np.ones(window)
    sums_N = np.convolve(np.where(known_N, values_N, 0.0), ones, "same")
    counts_N = np.convolve(known_N, ones, "same")
    return np.where(counts_N > 0.5, sums_N / np.maximum(counts_N, 1.0), np.nan)
