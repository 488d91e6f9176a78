"""Puzzles of reasoning-gym with several tries.

Each task of reasoning-gym is a question with one answer, without steps or a state. This environment makes a
conversation of the question: the task's own verifier scores every answer, and the policy may try again:

    "<answer>41</answer>"   -> "That scores 0.01 of 1. You may try 2 more times."
    "<answer>42</answer>"   -> 0.99, and the episode is over

The verifiers of some tasks (word ladder, sudoku, sokoban) give partial scores, which tell how near an answer is.
"""

import json
from collections.abc import Mapping
from typing import Any

from tpu_grpo.config.plugins import need
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.puzzle_scores import puzzle_score

need("reasoning_gym", "the environment reasoning_gym", EpisodeError)


class Puzzle:
    """The policy tries a puzzle several times; the rewards of its turns add up to its best score.

    Args:
        tries: how many answers the policy may give.
        tag: the answer is the content of the last ``<tag>``; null for the whole text.
    """

    _imported_before = ("reasoning_gym",)
    _strips_thinking = True  # `step` gets what follows it

    def __init__(self, tries: int = 3, tag: str | None = "answer") -> None:
        if tries < 1:
            raise ValueError(f"tries must be >= 1, got {tries}")
        self.tries, self.tag = tries, tag
        self.entry: dict[str, Any] = {}
        self.made, self.best = 0, 0.0

    def reset(self, metadata: Mapping[str, Any] | str, answer: Any = None, question: Any = "", **columns: Any) -> None:
        """Start the puzzle of a record that data.path=reasoning_gym:TASK made."""
        known = json.loads(metadata) if isinstance(metadata, str) else metadata
        if not isinstance(known, Mapping) or not isinstance(known.get("source_dataset"), str):
            raise ValueError(f"metadata must hold source_dataset, the puzzle's name, got {metadata!r:.200}")
        self.entry = {"question": question, "answer": answer, "metadata": known}
        self.made, self.best = 0, 0.0

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Score an answer, with 0 if the verifier raises; the reward is the increase of the best score so far."""
        self.made += 1
        given = self._inside(action)
        score = 0.0 if given is None else puzzle_score(given, self.entry) or 0.0
        gained, self.best = max(0.0, score - self.best), max(self.best, score)
        over = score >= 1.0 or self.made >= self.tries
        return self._feedback(given, score), gained, over, {"score": score}

    def _feedback(self, given: str | None, score: float) -> str:
        left = self.tries - self.made
        again = f"You may try {left} more time{'s' * (left > 1)}." if left else "That was the last try."
        if score >= 1.0:
            return "That is right."
        if given is None:
            return f"There must be an answer in <{self.tag}>...</{self.tag}>. {again}"
        return f"That scores {score:.3g} of 1. {again}"

    def _inside(self, text: str) -> str | None:
        if self.tag is None:
            return text.strip()
        close = text.rfind(f"</{self.tag}>")
        start = text.rfind(f"<{self.tag}>", 0, max(close, 0))
        return text[start + len(self.tag) + 2 : close].strip() if close >= 0 and start >= 0 else None
