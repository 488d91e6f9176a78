"""Looks for weights that are not finite, before a first step is made of them."""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpu_grpo.errors import CheckpointError
from tpu_grpo.models.messages import listed


def check_finite(model: nnx.Module, directory: Path) -> None:
    """See that every parameter of a model is finite; all hosts of its mesh call this.

    Raises:
        CheckpointError: naming the parameters that are not, by their paths in the model.
    """
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    answers = {".".join(str(getattr(key, "key", key)) for key in path): _is_finite(leaf) for path, leaf in leaves}
    if wrong := [name for name, finite in answers.items() if not bool(finite)]:
        raise CheckpointError(
            f"the weights in {directory} must be finite numbers, got NaN or infinity in {len(wrong)} of {len(answers)} "
            f"parameters: {listed(wrong)}; copy the checkpoint again, or take one that was saved before they came"
        )


def _is_finite(leaf: jax.Array) -> jax.Array:
    """Compute it where the parameter lies; every host gets the answer."""
    mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
    told = {} if mesh is None else {"out_shardings": NamedSharding(mesh, P())}
    return jax.jit(_all_finite, **told)(leaf)


def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()
