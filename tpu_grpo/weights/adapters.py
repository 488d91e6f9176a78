"""LoRA adapters: how they are found among the trainer's leaves, and how one is merged with its weight.

layers.0.attn.q_proj.w [D, N, H]   w_lora_a [D, rank]   w_lora_b [rank, N, H]      ->  w + a b alpha / rank

The product a b has the module's inputs first. Weights where they are not, such as [N, D, H], name their axis.
"""

from collections.abc import Iterable

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float

A, B = "_lora_a", "_lora_b"
"""The suffixes that qwix appends to a weight's name for the two matrices of its adapter."""


def adapters_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Map the name of every weight that has an adapter to the names of the adapter's two matrices."""
    return {name.removesuffix(A): (name, name.removesuffix(A) + B) for name in names if name.endswith(A)}


def merged(
    weight: Array, a: Float[Array, "*inputs r"], b: Float[Array, "r *outputs"], scale: float, input_axis: int = 0
) -> Array:
    """Return weight + scale * a b, with the product's first axis moved to ``input_axis``, computed in float32."""
    product = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), 1, precision=Precision.HIGHEST)
    return weight.astype(jnp.float32) + scale * jnp.moveaxis(product, 0, input_axis)
