"""What a reward is: a function over the columns of a batch.

A reward is called once per step with keyword arguments only, every list of length B in the row order of the rollout:

    def short(completions, limit=20, **columns):        # in my_rewards.py
        return [1.0 if len(c) <= limit else 0.0 for c in completions]

    rewards: [{name: "my_rewards.py:short", options: {limit: 40}}]

- ``prompts`` and ``completions`` are the texts; every column of the data follows under its own name.
- ``options`` of the config follow under theirs, unchanged; an option replaces a data column of the same name.
- A function without ``**kwargs`` gets only the names it declares, so it may leave out what it does not need.
"""

from collections.abc import Sequence
from typing import Any, Protocol

TEXT_ARGUMENTS = ("prompts", "completions")
"""Names that always mean the texts, whatever columns the data has."""


class Reward(Protocol):
    """Scores B completions: one finite number per row, or None for a row the reward does not apply to."""

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[float | None]:
        """Return B values for ``prompts`` [B], ``completions`` [B] and the data columns [B each]."""
        ...
