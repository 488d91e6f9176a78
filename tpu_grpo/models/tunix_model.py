"""Loads a checkpoint as Tunix's model on the trainer's mesh, or builds it without values.

    model = load_model(checkpoint, mesh, dtype=jnp.bfloat16, remat="decoder")
    model = abstract_model(abstract_checkpoint(Path("configs/models/Qwen3-8B")), mesh, dtype=jnp.bfloat16, remat="none")

Every parameter of an abstract model is a ``jax.ShapeDtypeStruct``, with the shape, dtype and sharding that it would get
from ``load_model``. Programs can be compiled from an abstract model, even for devices that this machine lacks.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from tpu_grpo.hosts.sharded_arrays import leaf_numbers
from tpu_grpo.models import tunix_repairs
from tpu_grpo.models.checkpoint import Checkpoint, check_mesh, listed
from tpu_grpo.models.families.family import Remat
from tpu_grpo.records.errors import CheckpointError, ConfigError


def load_model(
    checkpoint: Checkpoint,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    remat: Remat,
    flash_block: int | None = None,
    param_dtype: DTypeLike | None = None,
) -> nnx.Module:
    """Load the parameters, sharded over ``mesh`` (axes "fsdp" and "tp"); a host reads only what its devices hold.

    On a host without any device of the mesh, the model is that of `abstract_model`.

    ``dtype`` (float32 or bfloat16) is the dtype of the computation and of the parameters. With ``param_dtype``, the
    parameters have that dtype instead, and must be cast to ``dtype`` before the model is called. Logits are float32.
    ``remat`` says what the backward pass recomputes: nothing, the attention and MLP blocks, or whole decoder layers.
    ``flash_block`` is the block size from `trainer_attention.flash_block`; None means dot attention.

    Raises:
        ConfigError: for a mesh that does not fit the model, or a version of Tunix that was not reviewed.
    """
    if missing := {"fsdp", "tp"} - set(mesh.axis_names):
        raise ConfigError(f"the trainer's mesh must have axes fsdp and tp, got {mesh.axis_names}; add {missing}")
    model = abstract_model(checkpoint, mesh, dtype=dtype, remat=remat, flash_block=flash_block)
    if not mesh.local_devices:
        return model
    leaves = {leaf.source: leaf for leaf in checkpoint.family.all_leaves(checkpoint.config)}

    def read(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
        leaf = leaves[jax.tree_util.keystr(path, simple=True, separator=".")]
        tensors = [checkpoint.tensors[name].array() for name in leaf.tensors]
        stored = jnp.dtype(dtype if param_dtype is None else param_dtype)

        def part(index: Any) -> np.ndarray:
            return np.array(leaf.read(tensors, spec.shape, index), stored, order="C")

        return jax.make_array_from_callback(spec.shape, spec.sharding, part, dtype=stored)

    definition, state = nnx.split(model)
    return nnx.merge(definition, jax.tree.map_with_path(read, nnx.to_pure_dict(state)))


def abstract_model(
    checkpoint: Checkpoint, mesh: Mesh, *, dtype: DTypeLike, remat: Remat, flash_block: int | None = None
) -> nnx.Module:
    """Build Tunix's model with the shapes, dtypes and shardings of ``load_model``'s parameters without
    ``param_dtype``, but no values.

    Raises:
        ConfigError: for a mesh that does not fit the model, or a version of Tunix that was not reviewed.
    """
    check_mesh(checkpoint, mesh.shape["fsdp"], mesh.shape["tp"])
    tunix_repairs.apply()
    family = checkpoint.family
    config = family.model_config(checkpoint.config, dtype, remat, flash_block)
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: family.model_class()(config, rngs=nnx.Rngs(params=0)))
    definition, state = nnx.split(model)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), state)
    return nnx.merge(definition, with_shardings(state, mesh))


def with_shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """Add shardings over the mesh to abstract values, from the axis names of their variables."""
    shardings = nnx.get_named_sharding(state, mesh)
    return jax.tree.map(lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of), state, shardings)


def is_abstract(state: Any) -> bool:
    """Whether parameters are abstract, that is without values."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))


def by_name(state: nnx.State) -> dict[str, Any]:
    """Return the arrays of a state by their dotted names."""
    return {dotted(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(state)}


def dotted(path: tuple[Any, ...]) -> str:
    """Return the dotted name of a parameter's path in a state."""
    return ".".join(map(str, path))


def cast(leaf: Any, dtype: DTypeLike) -> Any:
    """Cast an array or a ``jax.ShapeDtypeStruct`` to a dtype."""
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    return leaf.astype(dtype)


def check_finite(model: nnx.Module, directory: Path) -> None:
    """Check that every parameter of a model is finite; all hosts of its mesh must call this. An abstract model passes.

    Raises:
        CheckpointError: naming the parameters that are not finite, by their paths in the model.
    """
    leaves = by_name(nnx.state(model, nnx.Param))
    if is_abstract(leaves):
        return
    answers = leaf_numbers(_all_finite, leaves)
    if wrong := [name for name, finite in answers.items() if not finite]:
        raise CheckpointError(
            f"the weights in {directory} must be finite numbers, got NaN or infinity in {len(wrong)} of {len(answers)} "
            f"parameters: {listed(wrong)}; copy the checkpoint again, or take one that was saved before they came"
        )


def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()
