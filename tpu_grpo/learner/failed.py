"""An update whose loss or gradient is not finite: what it was of, and as arrays that a file can hold.

Of such an update nothing arrived in the policy, so the parameters beside which it is kept are those that it had.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from tpu_grpo.config import UpdateSection
from tpu_grpo.learner.batches import DATA_AXIS
from tpu_grpo.learner.digest import whole
from tpu_grpo.learner.forward import ModelRows
from tpu_grpo.learner.loss import TrainBatch
from tpu_grpo.records.errors import DataError, NonFiniteError
from tpu_grpo.records.stages import ScoredRollout

PassArrays = dict[str, np.ndarray]
"""The arrays of a `TrainBatch` by name; those of its rows begin with ``rows.``."""


@dataclass(frozen=True)
class FailedUpdate:
    """An update of which nothing arrived in the policy."""

    step: int
    update: int
    """Which of the step's updates it was, from 1."""
    updates: int
    """How many the step has."""
    loss: float
    grad_norm: float
    passes: tuple[TrainBatch, ...]
    """Its micro-batches, on the devices."""
    scored: ScoredRollout
    """What the whole step sampled."""
    advantages: Float[np.ndarray, " B"]

    @property
    def what(self) -> str:
        """Say which number was not finite, and its value."""
        name, value = ("gradient norm", self.grad_norm) if math.isfinite(self.loss) else ("loss", self.loss)
        of_several = f", update {self.update} of {self.updates}," if self.updates > 1 else ""
        return f"the {name} of step {self.step}{of_several} must be finite, got {value:g}"

    def arrays(self) -> list[PassArrays]:
        """Return what the passes were of; every host must call it."""
        return [{name: whole(value) for name, value in pass_arrays(batch).items()} for batch in self.passes]


Keep = Callable[[FailedUpdate], Path]
"""Keeps an update in a file, on every host, and returns where."""


def passed_over(failed: FailedUpdate, section: UpdateSection, in_a_row: int, kept_in: Path | None) -> str:
    """Say that an update is skipped, which is the last of ``in_a_row``, the first of which may be ``kept_in`` a file.

    Raises:
        NonFiniteError: if it is not to be skipped, or is one too many.
    """
    what, kept = failed.what, ""
    if kept_in is not None:
        first = "it" if in_a_row == 1 else "the first of them"
        kept = f"; {first} is kept: look at it with `python scripts/run.py --replay {kept_in}`"
    if section.on_non_finite == "stop":
        raise NonFiniteError(
            f"{what}; nothing of it reached the policy{kept}. Continue from the last checkpoint with a lower "
            "optimizer.learning_rate or model.dtype=float32, which checkpoint.allow_changes must name, or set "
            "update.on_non_finite=skip"
        )
    if in_a_row > section.most_skipped:
        raise NonFiniteError(
            f"{what}; that makes {in_a_row} updates in a row, and update.max_skipped={section.most_skipped} may be "
            f"skipped{kept}. Continue from the last checkpoint with a lower optimizer.learning_rate or "
            "model.dtype=float32, which checkpoint.allow_changes must name"
        )
    return f"{what}; the update was skipped, and nothing of it reached the policy{kept}"


def pass_arrays(batch: TrainBatch) -> dict[str, Any]:
    """Return the arrays of a micro-batch by name, without those that it lacks."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "rows"}
    rows = {f"rows.{name}": value for name, value in batch.rows._asdict().items()}
    return {name: value for name, value in (rows | columns).items() if value is not None}


def placed_pass(arrays: Mapping[str, np.ndarray], mesh: Mesh) -> TrainBatch:
    """Put the arrays of a pass on the trainer's devices, as the run had them.

    Raises:
        DataError: for rows that this mesh cannot split.
    """
    count, devices = len(arrays["weights"]), mesh.shape[DATA_AXIS]
    if count % devices:
        raise DataError(
            f"a pass of {count} rows must be split over meshes.trainer.fsdp={devices} devices, which does not divide "
            "it; use as many devices as the run had, or a divisor"
        )
    sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    placed = {
        name: jax.make_array_from_callback(value.shape, sharding, lambda index, value=value: value[index])
        for name, value in arrays.items()
    }
    rows = ModelRows(**{name: placed.get(f"rows.{name}") for name in ModelRows._fields})
    others = {field.name: placed.get(field.name) for field in fields(TrainBatch) if field.name != "rows"}
    return jax.block_until_ready(TrainBatch(rows=rows, **others))
