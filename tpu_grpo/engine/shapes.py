"""The few padded shapes that a run compiles. They are chosen once from the config, never from the requests that come.

A decode program has one batch size, and a prefill program one number of tokens. Both take rows of any length up to the
context. All are compiled before the first step, and nothing after that.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_BATCH = 8
SMALLEST_PREFILL = 64
REFILL_SHARE = 16
"""While requests wait, a launch ends once a row out of this many has ended, and one row at least."""
LAUNCH_SECONDS = 0.05
"""A launch of decode steps should take at least this long: the host's part of it is a few milliseconds."""
BYTES_PER_SECOND = {"tpu": 1e12, "gpu": 1e12, "cpu": 2e10}
"""How fast a device of each platform reads weights, about; a decode step reads all of them."""
FEWEST_STEPS, MOST_STEPS = 4, 32


@dataclass(frozen=True)
class Shapes:
    """Ascending ladders of padded sizes; a size is padded to the first rung that is large enough."""

    batch: tuple[int, ...]
    """Rows of a decode step. The last rung is the most rows that run at once."""
    prefill: tuple[int, ...]
    """New tokens of all rows in a prefill step. The last rung is the chunk size."""
    context: int
    """Tokens of the longest row, rounded up to whole pages."""

    @property
    def max_rows(self) -> int:
        """The most rows that run at once."""
        return self.batch[-1]


def choose_shapes(
    *,
    context_tokens: int,
    page_size: int,
    max_running_requests: int,
    prefill_tokens: int,
    batch_paddings: Sequence[int] | None = None,
) -> Shapes:
    """Choose the ladders for these limits; ``batch_paddings`` replace the powers of two where they are given."""
    batch = tuple(sorted({b for b in batch_paddings or () if b < max_running_requests} | {max_running_requests}))
    prefill_tokens = max(prefill_tokens, max_running_requests)
    return Shapes(
        batch=batch if batch_paddings else ladder(SMALLEST_BATCH, max_running_requests, 2),
        prefill=ladder(max(SMALLEST_PREFILL, max_running_requests), prefill_tokens, 4),
        context=-(-context_tokens // page_size) * page_size,
    )


def ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Multiply ``first`` by ``factor`` while below ``last``, and end with ``last``: (8, 50, 2) gives 8, 16, 32, 50."""
    rungs = []
    while first < last:
        rungs.append(first)
        first *= factor
    return (*rungs, last)


def pad_to(rungs: Sequence[int], size: int) -> int:
    """Return the first rung that is at least ``size``.

    Raises:
        ValueError: if no rung is.
    """
    index = bisect_left(rungs, size)
    if index == len(rungs):
        raise ValueError(f"{size} is beyond the largest compiled size {rungs[-1]}")
    return rungs[index]


def choose_steps(weight_bytes: int, platform: str) -> int:
    """Choose the most decode steps of a launch: a power of two, for the bytes of weights on each device.

    Reading the weights so many times takes LAUNCH_SECONDS, within FEWEST_STEPS and MOST_STEPS. On a TPU, 0.6B
    parameters in bfloat16 (1.2 GB) get 32 steps, 8B on four devices (4 GB) 16, and 32B on four devices (16 GB) 4.
    """
    step_seconds, steps = weight_bytes / BYTES_PER_SECOND[platform], FEWEST_STEPS
    while steps < MOST_STEPS and steps * step_seconds < LAUNCH_SECONDS:
        steps *= 2
    return steps


def rows_left(rungs: Sequence[int], rows: int, *, waiting: bool) -> int:
    """Return how many running rows are so few that a launch of ``rows`` rows ends early.

    They fit a smaller program, or, if requests wait, enough rows are free for some of them.
    """
    smaller = max((rung for rung in rungs if rung < rows), default=0)
    return max(smaller, rows - max(1, rows // REFILL_SHARE)) if waiting else smaller
