"""Saving and restoring the policy and what updates it, through Orbax.

Of a model with adapters these alone are saved; the sums are of its other parameters as well, so that adapters are not
continued on another base.

    <run.dir>/checkpoints/<step>/   model_params, optimizer_state, and
                                    {"global_step": step, "format": FORMAT, "checksums": {...}}

model_params holds the model as it computes; optimizer_state holds the count of updates, the optimizer's moments, and
what the parameters have beyond ``model.dtype``. Where they are used, entropy_state holds the coefficient of an entropy
bonus that is adapted, and reference_params a reference of the KL penalty that is made anew now and then.

A step is saved on a thread of its own into a directory with a temporary name, renamed when it is complete: a process
that is killed leaves the previous checkpoint as the newest, and the next start removes what was unfinished.

Orbax stores no checksum of its own: a file with bytes changed in place may be read back without complaint. It is found
here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from tpu_grpo.errors import CheckpointError
from tpu_grpo.learner.digest import checksums
from tpu_grpo.learner.saving import SavingManager
from tpu_grpo.learner.trained import has_adapters
from tpu_grpo.learner.update import Updater, UpdateState, by_name

Resume = Literal["auto", "never", "require"]
FORMAT = 2
"""What a checkpoint's optimizer_state holds. 1, which was not written down: bfloat16 moments and accumulated gradients
of ``optax.MultiSteps``."""
_MODEL, _STATE = "model_params", "optimizer_state"
_ENTROPY, _REFERENCE = "entropy_state", "reference_params"


class _SavedState(NamedTuple):
    """The part of an `UpdateState` that every run has."""

    count: Any
    optimizer: Any
    kept: Any


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
    step = checkpoints.restore(updater, resume="auto")
    checkpoints.save(step + 1, updater)
    checkpoints.close()
    """

    def __init__(self, directory: Path, *, keep: int, reference: nnx.Module | None = None):
        self._directory, self._reference = directory.absolute(), reference
        self._kept = NewestAndBest(keep)
        self._starts_over = False

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Open the directory; a run that starts over does so at its first save, when an earlier run has made room."""
        options = ocp.CheckpointManagerOptions(preservation_policy=self._kept, cleanup_tmp_directories=True)
        manager = _manager(self._directory, options)
        if self._starts_over and (step := manager.latest_step()) is not None:
            manager.close()
            raise CheckpointError(
                f"checkpoint.resume=never needs an empty {self._directory}, found step {step}; move it away, or use "
                "another run.dir"
            )
        return manager

    def restore(self, updater: Updater, *, resume: Resume) -> int:
        """Load the newest checkpoint, exactly, and return its step; 0 if there is none.

        Raises:
            CheckpointError: for one that cannot be read back, and for none with ``require``. With ``never`` one that is
                there is not looked at now, and refused when the first step is saved.
        """
        self._starts_over = resume == "never"
        step = None if self._starts_over else self._manager.latest_step()
        if step is None:
            if resume == "require":
                raise CheckpointError(
                    f"checkpoint.resume=require needs a checkpoint in {self._directory}, found none; check run.dir, or "
                    "use checkpoint.resume=auto"
                )
            self._checksums(updater)  # compiles them now, not at the first save
            return 0
        self._read(step, updater)
        return step

    def save(self, step: int, updater: Updater, *, best: int | None = None) -> None:
        """Start saving; returns when the values are copied and may change. A step that is saved is left alone.

        Of the others the newest stay, and the step ``best``.
        """
        self._kept.best = best
        if step == self._manager.latest_step():
            return
        saved = self._items(updater)
        self._manager.save(
            step,
            args=ocp.args.Composite(**{item: ocp.args.PyTreeSave(tree) for item, tree in saved.items()}),
            custom_metadata={
                "global_step": step,
                "format": FORMAT,
                "checksums": self._checksums(updater),
            },
            force=True,
        )

    def close(self) -> None:
        """Wait until every save is complete; raises what the saving thread raised, such as OSError for a full disk."""
        if "_manager" in vars(self):
            self._manager.close()

    def _read(self, step: int, updater: Updater) -> None:
        wanted = self._items(updater)
        if missing := [item for item in wanted if not (self._directory / str(step) / item).is_dir()]:
            raise self._damaged(step, f"{' and '.join(missing)} is missing")
        try:
            metadata = self._manager.metadata(step).custom_metadata or {}
            self._check_format(step, metadata)
            found = self._manager.restore(step, args=_restore_args(wanted))
        except CheckpointError:
            raise
        except Exception as error:  # Orbax raises many types, and for a truncated array the bare Exception
            raise self._damaged(step, f"{type(error).__name__}: {str(error).strip()[:300]}") from error
        nnx.update(updater.model, found[_MODEL])
        state: _SavedState = found[_STATE]
        entropy = found[_ENTROPY] if _ENTROPY in wanted else ()
        updater.state = UpdateState(state.count, state.optimizer, state.kept, entropy)
        if self._reference is not None:
            nnx.update(self._reference, found[_REFERENCE])
        saved: dict[str, int] | None = metadata.get("checksums")
        if saved is None:
            raise self._damaged(step, "its checksums are missing")
        if wrong := [name for name, value in self._checksums(updater).items() if saved.get(name) != value]:
            raise self._damaged(step, f"{len(wrong)} arrays are not what was saved, the first {wrong[0]}")

    def _items(self, updater: Updater) -> dict[str, Any]:
        state = updater.state
        items = {_MODEL: _saved_part(updater.model), _STATE: _SavedState(state.count, state.optimizer, state.kept)}
        if state.entropy:
            items[_ENTROPY] = state.entropy
        return items if self._reference is None else items | {_REFERENCE: _saved_part(self._reference)}

    def _checksums(self, updater: Updater) -> dict[str, Any]:
        return _checksums(updater.model, updater, self._reference)

    def _check_format(self, step: int, metadata: dict[str, Any]) -> None:
        if "checksums" in metadata and (found := metadata.get("format", 1)) != FORMAT:
            raise CheckpointError(
                f"checkpoint {self._directory / str(step)} must have format {FORMAT}, got {found}: since then "
                "parameters are stepped in float32, moments are float32, and gradients are not kept between steps; "
                "finish that run with the version that wrote it, or start over with checkpoint.resume=never"
            )

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self._directory / str(step)} must hold this model and optimizer, whole, but could not be "
            f"restored ({reason}); remove that directory to continue from the one before, undo a change of model or "
            "optimizer, or start over with checkpoint.resume=never"
        )


def read_policy(directory: Path, step: int, model: nnx.Module) -> None:
    """Load the policy of one checkpoint into a model, without its optimizer; the run that saves there may go on.

    Raises:
        CheckpointError: for one that is not there, is damaged, or is of another model.
    """
    path = directory.absolute() / str(step)
    if not (path / _MODEL).is_dir():
        found = sorted(int(p.name) for p in directory.glob("*") if p.name.isdigit()) if directory.is_dir() else []
        raise CheckpointError(f"a checkpoint must be in {path}, found none; there are steps {found or 'none'}")
    manager = _manager(directory.absolute(), ocp.CheckpointManagerOptions(read_only=True))
    try:
        metadata = manager.metadata(step).custom_metadata or {}
        read = manager.restore(step, args=_restore_args({_MODEL: _saved_part(model)}))
    except Exception as error:  # Orbax raises many types, and for a truncated array the bare Exception
        raise CheckpointError(
            f"checkpoint {path} must hold this model, whole, but could not be read ({type(error).__name__}: "
            f"{str(error).strip()[:300]}); use the config of the run that saved it"
        ) from error
    finally:
        manager.close()
    nnx.update(model, read[_MODEL])
    saved: dict[str, int] = metadata.get("checksums") or {}
    if wrong := [name for name, value in _checksums(model).items() if saved.get(name) != value]:
        raise CheckpointError(
            f"checkpoint {path} must hold what was saved, but {len(wrong)} arrays do not, the first {wrong[0]}; take "
            "another step, or the config of the run that saved it"
        )


def _manager(directory: Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    # By default an array that several devices hold is cut into pieces, by a program compiled for each shape at the
    # first save. Only small arrays are held so, and they are saved whole.
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
    return SavingManager(
        directory,
        item_handlers={
            _MODEL: ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
            _STATE: ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
            _ENTROPY: ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
            _REFERENCE: ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        },
        options=options,
    )


def _saved_part(model: nnx.Module) -> nnx.State:
    return nnx.state(model, nnx.LoRAParam) if has_adapters(model) else nnx.state(model)


def _restore_args(trees: dict[str, Any]) -> ocp.args.Composite:
    """Ask for these trees, every array with the type and the sharding that it has there."""
    arguments = {
        item: ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(target=tree))
        for item, tree in trees.items()
    }
    return ocp.args.Composite(**arguments)


def _checksums(
    model: nnx.Module, updater: Updater | None = None, reference: nnx.Module | None = None
) -> dict[str, Any]:
    leaves = {f"model.{name}": leaf for name, leaf in by_name(nnx.state(model)).items()}
    if reference is not None:
        leaves |= {f"reference.{name}": leaf for name, leaf in by_name(_saved_part(reference)).items()}
    if updater is not None:
        paths = jax.tree_util.tree_leaves_with_path(updater.state)
        leaves |= {f"optimizer{jax.tree_util.keystr(path)}": leaf for path, leaf in paths}
    return checksums(leaves)
