"""Saving and restoring the policy and its optimizer, through Tunix's checkpoint manager (Orbax).

    <run.dir>/checkpoints/<step>/   model_params, optimizer_state, and {"global_step": step}

A step is saved on a thread of its own into a directory with a temporary name, renamed when it is complete: a process
that is killed leaves the previous checkpoint as the newest, and the next start removes what was unfinished.
"""

from pathlib import Path
from typing import Literal

import jax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.sft.checkpoint_manager import CheckpointManager

from tpu_grpo.errors import CheckpointError

Resume = Literal["auto", "never", "require"]
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, jax.errors.JaxRuntimeError)
"""What Orbax was seen to raise for missing, truncated and overwritten files, and for other shapes."""


class Checkpoints:
    """The checkpoints of one run, labelled by its steps.

    checkpoints = Checkpoints(directory, keep=2)
    step = checkpoints.restore(model, optimizer, resume="auto")
    checkpoints.save(step + 1, model, optimizer)
    checkpoints.close()
    """

    def __init__(self, directory: Path, *, keep: int):
        self._directory = directory.absolute()
        self._manager = CheckpointManager(
            str(self._directory), options=ocp.CheckpointManagerOptions(max_to_keep=keep, save_interval_steps=1)
        )

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
            return 0
        if resume == "never":
            raise CheckpointError(
                f"checkpoint.resume=never needs an empty {self._directory}, found step {step}; move it away, or use "
                "another run.dir"
            )
        try:
            self._manager.maybe_restore(model, optimizer, step)
        except _UNREADABLE as error:
            raise CheckpointError(
                f"checkpoint {self._directory / str(step)} must hold this model and optimizer whole, but could not be "
                f"read ({type(error).__name__}: {_first_line(error)}); remove that directory to continue from the one "
                "before, or set checkpoint.resume=never to start over"
            ) from error
        return step

    def save(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        """Start saving; returns when the values are copied and may change. A step that is saved is left alone."""
        if step != self._manager.latest_step():
            self._manager.save(step, model, optimizer, force=True, custom_metadata={"global_step": step})

    def close(self) -> None:
        """Wait until every save is complete.

        Raises:
            Whatever the saving thread raised, such as OSError for a full disk.
        """
        self._manager.close()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
