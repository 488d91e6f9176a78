"""Reads checkpoints back: each host its own part, whole or not at all.

Orbax stores no checksum of its own: a file with bytes changed in place may be read back without complaint. It is found
by the sums that are saved beside the arrays, see `tpu_grpo.learner.checkpoints`.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from tpu_grpo.learner.digest import checksums
from tpu_grpo.learner.update import by_name
from tpu_grpo.observe.run_files import saved_steps
from tpu_grpo.records.errors import CheckpointError

FORMAT = 2
"""What a checkpoint's optimizer_state holds. 1, which was not written down: bfloat16 moments and accumulated gradients
of ``optax.MultiSteps``."""
MODEL, STATE, ENTROPY, REFERENCE = "model_params", "optimizer_state", "entropy_state", "reference_params"
ITEMS = (MODEL, STATE, ENTROPY, REFERENCE)
SHOWN = 300
"""Of an error so many characters are quoted; Orbax prints whole trees."""


class Unsound(Exception):
    """A checkpoint is not what was saved, or is of another model or optimizer; says why."""


def read_items(
    path: Path, wanted: Mapping[str, Any], host: int, names: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, int]]:
    """Read what this host needs of some items of the checkpoint of a step; the other hosts are not waited for.

    Args:
        path: the checkpoint, ``<directory>/<step>``.
        wanted: by item the tree of arrays whose types and shardings are wanted.
        host: the index of this one.
        names: arrays that must have been saved, by the names of their sums.

    Returns:
        The items, and the sums that were saved with them.

    Raises:
        Unsound: it is damaged, another step's, or its arrays have other shapes.
        CheckpointError: it was written by another version, or for other arrays: another model, optimizer or loss.
    """
    reader = _reader(host)
    try:
        metadata = reader.metadata(path).custom_metadata or {}
        _check_metadata(path, metadata, names)
        if missing := [item for item in wanted if not (path / item).is_dir()]:
            raise Unsound(f"{' and '.join(missing)} is missing")
        return dict(reader.restore(path, args=restore_args(wanted)).items()), metadata["checksums"]
    except (CheckpointError, Unsound):
        raise
    except Exception as error:  # Orbax raises many types, and for a truncated array the bare Exception
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise  # the checkpoint is not to blame
        raise Unsound(f"{type(error).__name__}: {str(error).strip()[:SHOWN]}") from error
    finally:
        reader.close()


def check_sums(saved: Mapping[str, int], found: Mapping[str, int]) -> None:
    """Compare sums of arrays that were read with those that were saved.

    Raises:
        Unsound: for arrays that are not those that were saved, or were not saved.
    """
    if wrong := [name for name, value in found.items() if saved.get(name) != value]:
        raise Unsound(f"{len(wrong)} arrays are not what was saved, the first {wrong[0]}")


def read_policy(directory: Path, step: int, model: nnx.Module, host: int = 0) -> None:
    """Load the policy of one checkpoint into a model, without its optimizer; the run that saves there may go on.

    Raises:
        CheckpointError: for one that is not there, is damaged, or is of another model.
    """
    path = directory.absolute() / str(step)
    if not (path / MODEL).is_dir():
        found = list(saved_steps(directory))
        raise CheckpointError(f"a checkpoint must be in {path}, found none; there are steps {found or 'none'}")
    try:
        items, saved = read_items(path, {MODEL: saved_part(nnx.state(model))}, host)
        nnx.update(model, items[MODEL])
        check_sums(saved, checksums(model_leaves(nnx.state(model))))
    except Unsound as error:
        raise CheckpointError(
            f"checkpoint {path} must hold this model, whole, but could not be read ({error}); take another step, or "
            "the config of the run that saved it"
        ) from error


def handlers(**settings: Any) -> dict[str, ocp.PyTreeCheckpointHandler]:
    """Make a handler for every item that a checkpoint may hold, with further settings of Orbax."""
    # By default an array that several devices hold is cut into pieces, by a program compiled for each shape at the
    # first save. Only small arrays are held so, and they are saved whole. A file of shardings would take a quarter of
    # a small model's save, and nobody reads it: a run says which shardings it wants.
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False, enable_write_sharding_file=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
    return {item: ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **settings) for item in ITEMS}


def saved_part(state: nnx.State) -> nnx.State:
    """Return what a checkpoint holds of a model's state: its adapters if it has any, else all of it."""
    adapters = nnx.filter_state(state, nnx.LoRAParam)
    return adapters if nnx.to_flat_state(adapters) else state


def model_leaves(state: nnx.State) -> dict[str, Any]:
    """Return all arrays of a model's state by the names of their sums; adapters are not continued on another base."""
    return {f"model.{name}": leaf for name, leaf in by_name(state).items()}


def restore_args(trees: Mapping[str, Any]) -> ocp.args.Composite:
    """Ask for these trees, every array with the type and the sharding that it has there."""
    arguments = {
        item: ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(target=tree))
        for item, tree in trees.items()
    }
    return ocp.args.Composite(**arguments)


def _reader(host: int) -> ocp.Checkpointer:
    """Make what reads without the barriers of Orbax: a host whose read fails would not come to them."""
    alone = ocp.options.MultiprocessingOptions(
        primary_host=host, active_processes={host}, barrier_sync_key_prefix=f"reading_on_host_{host}"
    )
    options = ocp.CompositeOptions(multiprocessing_options=alone)
    items: dict[str, Any] = handlers(multiprocessing_options=alone)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, **items)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _check_metadata(path: Path, metadata: Mapping[str, Any], names: Collection[str]) -> None:
    if "checksums" not in metadata:
        raise Unsound("its checksums are missing")
    if (found := metadata.get("format", 1)) != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} must have format {FORMAT}, got {found}: since then parameters are stepped in float32, "
            "moments are float32, and gradients are not kept between steps; finish that run with the version that "
            "wrote it, or start over with checkpoint.resume=never"
        )
    if (step := metadata.get("global_step")) != int(path.name):
        raise Unsound(f"it is named {path.name} and holds step {step}")
    if lacking := sorted(set(names) - set(metadata["checksums"])):
        raise CheckpointError(
            f"checkpoint {path} must hold all arrays that this run trains with, and was saved without {len(lacking)} "
            f"of {len(names)}, the first {lacking[0]}; undo a change of model, optimizer or algorithm, or start over "
            "with checkpoint.resume=never"
        )
