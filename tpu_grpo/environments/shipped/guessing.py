"""A guessing game of several turns, without tools.

    reset    -> "Guess a number from 1 to 100."
    "50"     -> "higher"
    "It is 75." -> "lower"
    "63"     -> 0.8, and the game is over

The earlier the guess is right, the higher the reward: it falls linearly from 1.0 for the first guess to ``last`` for
the last guess that is allowed. A player who halves the range needs at most ceil(log2(n + 1)) guesses.
"""

import random
import re
from typing import Any

MOST_DIGITS = 1000
"""A number with more digits is ignored; Python reads at most 4,300."""
_NUMBER = re.compile(r"-?[0-9]+")


class Guessing:
    """The policy guesses a secret number; each answer says whether the secret is higher or lower than the guess.

    Args:
        lowest: the smallest possible number.
        highest: the largest possible number.
        guesses: how many guesses are allowed.
        last: the reward if only the last guess is right.
        greets: whether ``reset`` returns the instructions; set it to false if the prompt contains them.
    """

    _strips_thinking = True  # `step` gets what follows it

    def __init__(
        self, lowest: int = 1, highest: int = 100, guesses: int = 8, last: float = 0.3, greets: bool = True
    ) -> None:
        if lowest >= highest:
            raise ValueError(f"lowest must be below highest, got {lowest} and {highest}")
        if guesses < 1:
            raise ValueError(f"guesses must be >= 1, got {guesses}")
        self.lowest, self.highest, self.guesses, self.last, self.greets = lowest, highest, guesses, last, greets
        self.secret, self.made = lowest, 0

    def reset(self, secret: int | str | None = None, **columns: Any) -> str | None:
        """Choose the secret: the column ``secret`` if there is one, else a random number that a whole group shares."""
        self.secret = random.randint(self.lowest, self.highest) if secret is None else int(secret)
        if not self.lowest <= self.secret <= self.highest:
            raise ValueError(f"secret must be from {self.lowest} to {self.highest}, got {self.secret}")
        self.made = 0
        return f"Guess a number from {self.lowest} to {self.highest}." if self.greets else None

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Read the guess, the last number of a text; a text without a number uses up a guess, too."""
        guess = _guess(action)
        self.made += 1
        if guess == self.secret:
            worth = 1.0 - (1.0 - self.last) * (self.made - 1) / max(self.guesses - 1, 1)
            return "right", worth, True, {"guesses": self.made}
        over = self.made >= self.guesses
        if guess is None:
            return "no number", 0.0, over, {}
        return ("higher" if self.secret > guess else "lower"), 0.0, over, {}


def _guess(text: str) -> int | None:
    """Return the last number of a text; None without one."""
    found = _NUMBER.findall(text)
    return int(found[-1]) if found and len(found[-1]) <= MOST_DIGITS else None


def secrets(lowest: int = 1, highest: int = 100, size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Make data for the game: records with ``question``, which says what to do, and ``secret``."""
    drawn = random.Random(seed)
    question = (
        f"I think of a number from {lowest} to {highest}. Guess it; I say whether it is higher or lower. Answer with a "
        "number each time."
    )
    return [{"question": question, "secret": drawn.randint(lowest, highest)} for _ in range(size)]
