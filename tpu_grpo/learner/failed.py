"""Updates whose loss or gradient is not finite.

Such an update has changed no parameter, so the parameters saved with it are those from before it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import UpdateSection
from tpu_grpo.learner.batches import PassArrays, pass_arrays
from tpu_grpo.learner.loss import TrainBatch
from tpu_grpo.learner.parameters import whole
from tpu_grpo.records.errors import NonFiniteError
from tpu_grpo.records.stages import ScoredRollout


@dataclass(frozen=True)
class FailedUpdate:
    """An update that was not applied."""

    step: int
    update: int
    """Which of the step's updates it was, from 1."""
    updates: int
    """The number of updates in the step."""
    loss: float
    grad_norm: float
    passes: tuple[TrainBatch, ...]
    """The update's micro-batches, on the devices."""
    scored: ScoredRollout
    """The rollout of the whole step."""
    advantages: Float[np.ndarray, " B"]
    algorithm: str = "grpo"
    """The name of the algorithm that computed the loss."""

    @property
    def what(self) -> str:
        """A message that says which number was not finite, and its value."""
        name, value = ("gradient norm", self.grad_norm) if math.isfinite(self.loss) else ("loss", self.loss)
        of_several = f", update {self.update} of {self.updates}," if self.updates > 1 else ""
        own = f" with algorithm.name={self.algorithm}" if ":" in self.algorithm else ""
        return f"the {name} of step {self.step}{of_several}{own} must be finite, got {value:g}"

    def arrays(self) -> list[PassArrays]:
        """Return the inputs of the update's passes; every host must call it."""
        return [{name: whole(value) for name, value in pass_arrays(batch).items()} for batch in self.passes]


class SkippedUpdates:
    """Handles updates that were not applied: they are skipped, and the first of several in a row is kept in a file.

    The function ``keep``, if it is set, writes that file, on every host, and returns its path.
    """

    def __init__(self, section: UpdateSection):
        self._section = section
        self.keep: Callable[[FailedUpdate], Path] | None = None
        self._in_a_row, self._kept_in = 0, None

    def interrupted(self) -> None:
        """Note that an update was applied, which ends a row of skipped ones."""
        self._in_a_row = 0

    def add(self, failed: FailedUpdate) -> str:
        """Skip an update, and return a note about it. Raises NonFiniteError if updates are not to be skipped, or too
        many in a row were."""
        if not self._in_a_row:
            self._kept_in = self.keep(failed) if self.keep else None
        self._in_a_row += 1
        what, kept, section = failed.what, "", self._section
        if self._kept_in is not None:
            first = "it" if self._in_a_row == 1 else "the first of them"
            kept = f"; {first} is kept: look at it with `python scripts/run.py --replay {self._kept_in}`"
        if section.on_non_finite == "stop":
            raise NonFiniteError(
                f"{what}; nothing of it reached the policy{kept}. Continue from the last checkpoint with a lower "
                "optimizer.learning_rate or model.dtype=float32, which checkpoint.allow_changes must name, or set "
                "update.on_non_finite=skip"
            )
        if self._in_a_row > section.most_skipped:
            raise NonFiniteError(
                f"{what}; that makes {self._in_a_row} updates in a row, and update.max_skipped={section.most_skipped} "
                f"may be skipped{kept}. Continue from the last checkpoint with a lower optimizer.learning_rate or "
                "model.dtype=float32, which checkpoint.allow_changes must name"
            )
        return f"{what}; the update was skipped, and nothing of it reached the policy{kept}"
