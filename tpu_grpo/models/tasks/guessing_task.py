"""The guessing task: find one of ten numbers in four guesses. The simulated teacher mostly swaps "higher" and "lower".

    4730-4739? -> 4734 (higher) -> 4737 (lower) -> 4735                       the teacher follows the hints
    4730-4739? -> 4734 (higher) -> 4732 (higher) -> 4730 (higher) -> 4735     the teacher swaps the hints

The user's hints are in parentheses. In one game, the teacher follows all hints or swaps all. Each guess is near the
middle of the numbers not yet excluded. If none are left, all ten count again. GRPO with a reward for won games makes
the model follow the hints.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from tpu_grpo.models.tasks.lessons import Lesson, Problem, Split, Task

COUNT = 10
"""How many numbers a game has; they differ only in the last digit."""
SMALLEST, LARGEST = 1000, 9999
GUESSES = 4
"""The number of guesses allowed, which is enough for bisection."""
LISTENS = 0.25
"""The share of games in which the teacher follows the hints; in other games he swaps "higher" and "lower"."""
HELDOUT_RANGES = 20
_SPLIT_SEED = 20261123  # fixed, so that every run holds out the same problems


def problems(split: Split) -> list[Problem]:
    """Return a split's problems as records with ``question`` ("4730-4739?"), ``secret`` and ``answer`` ("4735").

    ``secret`` and ``answer`` are both the number to find. A range of ten numbers gives ten problems, one for each of
    its numbers. The held-out split has 20 ranges, the training split the other 880.
    """
    heldout, wanted = _heldout(), split == "heldout"
    lows = [low for low in range(SMALLEST, LARGEST + 1, COUNT) if (low in heldout) == wanted]
    return [
        {"question": f"{low}-{low + COUNT - 1}?", "secret": str(secret), "answer": str(secret)}
        for low in lows
        for secret in range(low, low + COUNT)
    ]


def lesson(problem: Problem, rng: np.random.Generator) -> Lesson:
    """Return a game as the teacher plays it, up to the last guess."""
    secret, low = int(problem["secret"]), int(problem["question"].partition("-")[0])
    all_numbers = left = range(low, low + COUNT)
    listens = rng.random() < LISTENS
    game = [{"role": "user", "content": problem["question"]}]
    for more in reversed(range(GUESSES)):
        guess = int(rng.choice(_middle(left)))
        game.append({"role": "assistant", "content": str(guess)})
        if guess == secret or not more:
            break
        game.append({"role": "user", "content": "higher" if secret > guess else "lower"})
        upwards = (secret > guess) == listens
        left = [number for number in left if (number > guess if upwards else number < guess)] or all_numbers
    return game


def _middle(numbers: Sequence[int]) -> Sequence[int]:
    """Return the two middle numbers of an even count, the three middle ones of an odd count, or the only number."""
    beside = max(len(numbers) - 2, 0) // 2
    return numbers[beside : len(numbers) - beside]


@cache
def _heldout() -> frozenset[int]:
    """Draw the lowest numbers of the held-out ranges."""
    lows = np.arange(SMALLEST, LARGEST + 1, COUNT)
    return frozenset(np.random.default_rng(_SPLIT_SEED).choice(lows, HELDOUT_RANGES, replace=False).tolist())


TASK = Task(
    problems=problems,
    lesson=lesson,
    longest=56,
    decides=lambda: {"heldout": sorted(_heldout()), "count": COUNT, "guesses": GUESSES, "listens": LISTENS},
)
