"""Builds abstract models: the shapes, dtypes and shardings of the model that ``load_model`` would load.

    checkpoint = abstract_checkpoint(Path("configs/models/Qwen3-8B"))    # reads config.json and nothing else
    model = abstract_model(checkpoint, mesh, dtype=jnp.bfloat16, remat="decoder")

Every parameter is a ``jax.ShapeDtypeStruct``. Programs can be compiled from them, also for devices that are not here.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from tpu_grpo.models import repairs
from tpu_grpo.models.checkpoint import Checkpoint, check_mesh
from tpu_grpo.models.families import Remat
from tpu_grpo.models.hf_config import read_hf_config


def abstract_checkpoint(directory: Path) -> Checkpoint:
    """Read a checkpoint's config.json alone; its weights need not be there.

    Raises:
        CheckpointError: for a missing or broken config.json, an unsupported family or setting.
    """
    hf_config, family, config = read_hf_config(directory.expanduser())
    return Checkpoint(directory, hf_config, family, config, files=())


def abstract_model(
    checkpoint: Checkpoint, mesh: Mesh, *, dtype: DTypeLike, remat: Remat, flash_block: int | None = None
) -> nnx.Module:
    """Build Tunix's model with the parameters' shapes, dtypes and shardings of ``load_model``, and no values.

    Raises:
        ConfigError: for a mesh that does not fit the model, or a version of Tunix that was not reviewed.
    """
    check_mesh(checkpoint, mesh.shape["fsdp"], mesh.shape["tp"])
    repairs.apply()
    family = checkpoint.family
    config = repairs.fitted_config(family.model_config(checkpoint.config, dtype, remat, flash_block), mesh)
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: family.model_class()(config, rngs=nnx.Rngs(params=0)))
    definition, state = nnx.split(model)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), state)
    return nnx.merge(definition, with_shardings(state, mesh))


def with_shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """Add to abstract values the shardings over the mesh that their variables ask for."""

    def split(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(split, state, nnx.get_named_sharding(state, mesh))


def is_abstract(state: Any) -> bool:
    """Whether parameters are abstract, that is without values."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
