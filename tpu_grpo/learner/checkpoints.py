"""Saving and restoring the policy and its optimizer, through Tunix's checkpoint manager (Orbax).

Of a model with adapters these alone are saved; the sums are of its other parameters as well, so that adapters are not
continued on another base.

    <run.dir>/checkpoints/<step>/   model_params, optimizer_state, and {"global_step": step, "checksums": {...}}

A step is saved on a thread of its own into a directory with a temporary name, renamed when it is complete: a process
that is killed leaves the previous checkpoint as the newest, and the next start removes what was unfinished.

Orbax stores no checksum of its own: a file with bytes changed in place may be read back without complaint, and a
checkpoint without its optimizer is restored by Tunix as if that were meant. Both are found here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from tpu_grpo.errors import CheckpointError
from tpu_grpo.learner.digest import checksums
from tpu_grpo.learner.repairs import WholeArrayCheckpointManager
from tpu_grpo.learner.trained import has_adapters

Resume = Literal["auto", "never", "require"]
_ITEMS = ("model_params", "optimizer_state")


@dataclass
class NewestAndBest(PreservationPolicy):
    """Has Orbax keep the ``count`` newest checkpoints, and one that is the best."""

    count: int
    best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Give one answer per checkpoint; checkpoints come in the order of their steps."""
        newest = {checkpoint.step for checkpoint in checkpoints[-self.count :]}
        return [checkpoint.step in newest or checkpoint.step == self.best for checkpoint in checkpoints]


class Checkpoints:
    """Saves and restores the checkpoints of one run, labelled by its steps.

    checkpoints = Checkpoints(directory, keep=2)
    step = checkpoints.restore(model, optimizer, resume="auto")
    checkpoints.save(step + 1, model, optimizer)
    checkpoints.close()
    """

    def __init__(self, directory: Path, *, keep: int):
        self._directory = directory.absolute()
        self._kept = NewestAndBest(keep)
        options = ocp.CheckpointManagerOptions(preservation_policy=self._kept, cleanup_tmp_directories=True)
        self._manager = WholeArrayCheckpointManager(str(self._directory), options)

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer, *, resume: Resume) -> int:
        """Load the newest checkpoint into both, exactly, and return its step; 0 if there is none.

        Raises:
            CheckpointError: for one that cannot be read back, for none with ``require``, for one with ``never``.
        """
        step = self._manager.latest_step()
        if step is None:
            if resume == "require":
                raise CheckpointError(
                    f"checkpoint.resume=require needs a checkpoint in {self._directory}, found none; check run.dir, or "
                    "use checkpoint.resume=auto"
                )
            _checksums(model, optimizer)  # compiles them now, not at the first save
            return 0
        if resume == "never":
            raise CheckpointError(
                f"checkpoint.resume=never needs an empty {self._directory}, found step {step}; move it away, or use "
                "another run.dir"
            )
        self._read(step, model, optimizer)
        return step

    def save(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, *, best: int | None = None) -> None:
        """Start saving; returns when the values are copied and may change. A step that is saved is left alone.

        Of the others the newest stay, and the step ``best``.
        """
        self._kept.best = best
        if step != self._manager.latest_step():
            metadata = {"global_step": step, "checksums": _checksums(model, optimizer)}
            self._manager.save(step, model, optimizer, has_adapters(model), force=True, custom_metadata=metadata)

    def close(self) -> None:
        """Wait until every save is complete; raises what the saving thread raised, such as OSError for a full disk."""
        self._manager.close()

    def _read(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        if missing := [item for item in _ITEMS if not (self._directory / str(step) / item).is_dir()]:
            raise self._damaged(step, f"{' and '.join(missing)} is missing")
        try:
            _, metadata = self._manager.maybe_restore(model, optimizer, step, has_adapters(model))
        except Exception as error:  # Orbax raises many types, and for a truncated array the bare Exception
            raise self._damaged(step, f"{type(error).__name__}: {str(error).strip()[:300]}") from error
        saved: dict[str, int] | None = metadata.get("checksums")
        if saved is None:
            raise self._damaged(step, "its checksums are missing")
        if wrong := [name for name, value in _checksums(model, optimizer).items() if saved.get(name) != value]:
            raise self._damaged(step, f"{len(wrong)} arrays are not what was saved, the first {wrong[0]}")

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self._directory / str(step)} must hold this model and optimizer, whole, but could not be "
            f"restored ({reason}); remove that directory to continue from the one before, undo a change of model, "
            "optimizer or algorithm.micro_batch_prompts, or start over with checkpoint.resume=never"
        )


def read_policy(directory: Path, step: int, model: nnx.Module) -> None:
    """Load the policy of one checkpoint into a model, without its optimizer; the run that saves there may go on.

    Raises:
        CheckpointError: for one that is not there, is damaged, or is of another model.
    """
    path = directory.absolute() / str(step)
    if not (path / _ITEMS[0]).is_dir():
        found = sorted(int(p.name) for p in directory.glob("*") if p.name.isdigit()) if directory.is_dir() else []
        raise CheckpointError(f"a checkpoint must be in {path}, found none; there are steps {found or 'none'}")
    manager = WholeArrayCheckpointManager(str(directory.absolute()), ocp.CheckpointManagerOptions(read_only=True))
    try:
        _, metadata = manager.maybe_restore(model, None, step, has_adapters(model))
    except Exception as error:  # Orbax raises many types, and for a truncated array the bare Exception
        raise CheckpointError(
            f"checkpoint {path} must hold this model, whole, but could not be read ({type(error).__name__}: "
            f"{str(error).strip()[:300]}); use the config of the run that saved it"
        ) from error
    finally:
        manager.close()
    saved: dict[str, int] = metadata.get("checksums") or {}
    if wrong := [name for name, value in _checksums(model).items() if saved.get(name) != value]:
        raise CheckpointError(
            f"checkpoint {path} must hold what was saved, but {len(wrong)} arrays do not, the first {wrong[0]}; take "
            "another step, or the config of the run that saved it"
        )


def _checksums(model: nnx.Module, optimizer: nnx.Optimizer | None = None) -> dict[str, Any]:
    parts = {"model": nnx.state(model)}
    if optimizer is not None:
        parts["optimizer"] = nnx.state(optimizer, nnx.optimizer.OptState)
    return {f"{part}.{name}": value for part, state in parts.items() for name, value in checksums(state).items()}
