"""Completions of which the engine gave a log-probability that cannot be: not finite, or above 0.

The weights that it holds, or its computation, are broken then, and nothing can be learnt from the tokens.
"""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from tpu_grpo.records.errors import NonFiniteError
from tpu_grpo.records.stages import Completion, Prompt

_SHORT = reprlib.Repr(maxstring=120)


@dataclass(frozen=True)
class BrokenRollout:
    """A BrokenRollout is all that was sampled together with such a completion."""

    step: int
    """The step that it was sampled for, and 0 for an evaluation."""
    prompts: tuple[Prompt, ...]
    """The prompt of each completion."""
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]

    @property
    def what(self) -> str:
        """Say what was sampled."""
        return f"step {self.step}" if self.step else "an evaluation"

    @property
    def rows(self) -> list[int]:
        """List the rows with such a log-probability."""
        return [row for row, completion in enumerate(self.completions) if impossible(completion).any()]

    def error(self, kept_in: Path | None) -> NonFiniteError:
        """Name the first such row with its prompt and completion, and where everything is kept."""
        row = self.rows[0]
        bad_T = impossible(self.completions[row])
        place = int(np.argmax(bad_T))
        others = f", and {len(self.rows) - 1} more rows have such ones" if len(self.rows) > 1 else ""
        kept = "" if kept_in is None else f". All rows are kept, with their tokens and log-probabilities: {kept_in}"
        return NonFiniteError(
            f"the engine's log-probabilities must be finite and at most 0, got "
            f"{self.completions[row].logprobs[place]} for token {place} of row {row} of {self.what} (prompt "
            f"{_SHORT.repr(self.prompts[row].text)}, completion {_SHORT.repr(self.texts[row])}){others}; nothing was "
            f"learnt from them{kept}. Continue from the last checkpoint with a lower optimizer.learning_rate or "
            "model.dtype=float32, which checkpoint.allow_changes must name; at a first step look at the model's weights"
        )


KeepBroken = Callable[[BrokenRollout], Path]
"""Keeps them in a file, on every host, and returns where."""


def impossible(completion: Completion) -> Bool[np.ndarray, " T"]:
    """Say which sampled tokens have a log-probability that is not finite, or above 0."""
    bad_T = ~(np.isfinite(completion.logprobs) & (completion.logprobs <= 0.0))
    return bad_T if completion.sampled is None else bad_T & completion.sampled
