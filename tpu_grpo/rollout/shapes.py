"""The few padded shapes a run compiles: chosen once from the config, never from what arrives.

A decode program has one batch size, a prefill program one number of tokens; both take rows of any length up to the
context. All are compiled when the engine is built, and nothing after that.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_BATCH = 8
SMALLEST_PREFILL = 64


@dataclass(frozen=True)
class Shapes:
    """Ladders of paddings, each ascending; a size is padded to the first rung that holds it."""

    batch: tuple[int, ...]
    """Rows of a decode step; the last is the most rows that run at once."""
    prefill: tuple[int, ...]
    """New tokens of a prefill step over all rows; the last is the chunk size."""
    context: int
    """Tokens of the longest row, whole pages."""

    @property
    def max_rows(self) -> int:
        """Most rows that run at once."""
        return self.batch[-1]


def choose_shapes(
    *,
    context_tokens: int,
    page_size: int,
    max_running_requests: int,
    prefill_tokens: int,
    batch_paddings: Sequence[int] | None = None,
) -> Shapes:
    """The ladders for these limits; given ``batch_paddings`` replace the powers of two."""
    batch = tuple(sorted({b for b in batch_paddings or () if b < max_running_requests} | {max_running_requests}))
    prefill_tokens = max(prefill_tokens, max_running_requests)
    return Shapes(
        batch=batch if batch_paddings else ladder(SMALLEST_BATCH, max_running_requests, 2),
        prefill=ladder(max(SMALLEST_PREFILL, max_running_requests), prefill_tokens, 4),
        context=-(-context_tokens // page_size) * page_size,
    )


def ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """``first``, ``first * factor``, ... below ``last``, then ``last``: ``ladder(8, 50, 2) == (8, 16, 32, 50)``."""
    rungs = []
    while first < last:
        rungs.append(first)
        first *= factor
    return (*rungs, last)


def pad_to(rungs: Sequence[int], size: int) -> int:
    """The first rung that holds ``size``.

    Raises:
        ValueError: if none does.
    """
    index = bisect_left(rungs, size)
    if index == len(rungs):
        raise ValueError(f"{size} is beyond the largest compiled size {rungs[-1]}")
    return rungs[index]
