"""Looks for weights that are not finite, before a first step is made of them."""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_grpo.hosts.leaf_numbers import leaf_numbers
from tpu_grpo.models.messages import listed
from tpu_grpo.records.errors import CheckpointError


def check_finite(model: nnx.Module, directory: Path) -> None:
    """See that every parameter of a model is finite; all hosts of its mesh call this.

    Raises:
        CheckpointError: naming the parameters that are not, by their paths in the model.
    """
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    leaves = {".".join(map(str, path)): leaf.get_raw_value() for path, leaf in state}
    answers = leaf_numbers(_all_finite, leaves)
    if wrong := [name for name, finite in answers.items() if not finite]:
        raise CheckpointError(
            f"the weights in {directory} must be finite numbers, got NaN or infinity in {len(wrong)} of {len(answers)} "
            f"parameters: {listed(wrong)}; copy the checkpoint again, or take one that was saved before they came"
        )


def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()
