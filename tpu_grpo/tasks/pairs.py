"""Problems about two numbers of two digits, divided into what is trained on and what is held out."""

from functools import cache
from itertools import combinations

import numpy as np

from tpu_grpo.tasks.task import Split

SMALLEST, LARGEST = 10, 99
HELDOUT_PAIRS = 256


def operands(split: Split, seed: int) -> list[tuple[int, int]]:
    """Return the numbers (a, b) of a split, ordered by a, then b.

    The held-out split has 256 pairs of different numbers, each in both orders; the training split has all others.
    ``seed`` decides which pairs.
    """
    numbers = range(SMALLEST, LARGEST + 1)
    heldout, wanted = _heldout_pairs(seed), split == "heldout"
    return [(a, b) for a in numbers for b in numbers if ((min(a, b), max(a, b)) in heldout) == wanted]


@cache
def _heldout_pairs(seed: int) -> frozenset[tuple[int, int]]:
    pairs = list(combinations(range(SMALLEST, LARGEST + 1), 2))
    chosen = np.random.default_rng(seed).choice(len(pairs), HELDOUT_PAIRS, replace=False)
    return frozenset(pairs[i] for i in chosen)
