"""Packs sequences into training rows of a fixed number of tokens, so that hardly any padding is computed.

    packing = pack(lengths, row_tokens=8, multiple=2)

    lengths 5 3 4 2 2           row 0    a a a a a b b b
                                row 1    c c c c d d e e

Every host computes the same packing from the same lengths. It is best-fit decreasing (Johnson 1973, "Near-optimal bin
packing algorithms"), which says how many rows it takes; they are rounded up to whole micro-batches, and the sequences
are dealt anew to all of them, the longest first and each to the row with the least work, so that devices have equal
work.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True)
class Packing:
    """Says where N sequences lie."""

    rows: Int[np.ndarray, " N"]
    """The training row of each sequence."""
    starts: Int[np.ndarray, " N"]
    """The place of its first token in the row."""
    segments: Int[np.ndarray, " N"]
    """Its number in the row, from 1."""
    count: int
    """The training rows, empty ones among them."""


def pack(lengths: Sequence[int], *, row_tokens: int, multiple: int) -> Packing:
    """Pack sequences of ``lengths`` tokens, each at most ``row_tokens``, into a ``multiple`` of rows."""
    assert max(lengths) <= row_tokens, "train_rows refuses longer sequences"
    tight = _best_fit(lengths, row_tokens)
    count = -(-(int(tight.max()) + 1) // multiple) * multiple
    rows = _balanced(lengths, row_tokens, count)
    rows = tight if rows is None else rows
    starts, segments = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    ends, counts = [0] * count, [0] * count
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        counts[row] += 1
        starts[index], segments[index] = ends[row], counts[row]
        ends[row] += length
    return Packing(rows, starts, segments, count)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _best_fit(lengths: Sequence[int], row_tokens: int) -> Int[np.ndarray, " N"]:
    """Put each sequence, the longest first, into the row that it fills best, or into a new one."""
    rows, count = np.zeros(len(lengths), np.int64), 0
    rooms: list[tuple[int, int]] = []  # (tokens that are left, row), ascending
    for index in _longest_first(lengths):
        place = bisect_left(rooms, (lengths[index], 0))
        if place == len(rooms):
            room, row = row_tokens, count
            count += 1
        else:
            room, row = rooms.pop(place)
        rows[index] = row
        insort(rooms, (room - lengths[index], row))
    return rows


def _balanced(lengths: Sequence[int], row_tokens: int, count: int) -> Int[np.ndarray, " N"] | None:
    """Deal the sequences to ``count`` rows by work; None if a sequence finds no room that way.

    The work of a sequence is its tokens, and for attention their square over the length of a row.
    """
    rows, work, room = np.zeros(len(lengths), np.int64), np.zeros(count), np.full(count, row_tokens)
    for index in _longest_first(lengths):
        length = lengths[index]
        row = int(np.where(room >= length, work, np.inf).argmin())
        if room[row] < length:
            return None
        rows[index] = row
        room[row] -= length
        work[row] += length * (1 + length / row_tokens)
    return rows
