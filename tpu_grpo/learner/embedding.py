"""The rows of an embedding for tokens, with a gradient that adds up in float32.

jax adds the gradients of a row's places in the type of the matrix. In bfloat16 the sum of n equal gradients ends at 256
of them, and with independent ones the gradient of a token that stood at 1,300 of 16,384 places was 4 % off.

Rows are split by their width over fsdp. So every device adds its part of the width for the tokens of all devices, for
which it receives as many bytes as the gradients of its own tokens have. Left alone, the compiler gives every device the
whole gradients of all tokens, which do not fit on large slices.

Suffixes: R rows of tokens, S tokens of a row, V vocabulary, D width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int


def add_gradients_in_float32(embedder: Any, mesh: Mesh) -> None:
    """Let an embedder of Tunix's read its rows by `embedded`."""
    embedder.input_embedding = _Embedding(embedder.input_embedding.get_value(), mesh=mesh)


class _Embedding(nnx.Param[Any]):
    """A matrix from which Tunix's models read the rows of tokens by ``[(token_ids,)]``."""

    def __getitem__(self, key: tuple[Int[Array, "R S"]]) -> Float[Array, "R S D"]:
        return embedded(self.mesh, self.get_value(), *key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def embedded(mesh: Mesh, weight_VD: Float[Array, "V D"], token_ids: Int[Array, "R S"]) -> Float[Array, "R S D"]:
    """Return the row of each token. The mesh's axes are fsdp, whose size divides D, and tp, whose size divides V."""
    return weight_VD[token_ids]


def _forward(mesh: Mesh, weight_VD: Any, token_ids: Any) -> tuple[Any, Any]:
    return embedded(mesh, weight_VD, token_ids), (weight_VD, token_ids)


def _backward(mesh: Mesh, saved: Any, gradient_RSD: Any) -> tuple[Any, None]:
    weight_VD, token_ids = saved
    gradient_RSD = laid_out(gradient_RSD, mesh, None, None, "fsdp").astype(jnp.float32)
    sums_VD = jnp.zeros_like(weight_VD, jnp.float32).at[token_ids].add(gradient_RSD)
    return laid_out(sums_VD, mesh, "tp", "fsdp").astype(weight_VD.dtype), None


embedded.defvjp(_forward, _backward)


def laid_out(values: Array, mesh: Mesh, *axes: str | None) -> Array:
    """Split each dimension of an array, and of its gradient, over a mesh axis, or not at all."""
    return lax.with_sharding_constraint(values, NamedSharding(mesh, P(*axes)))
