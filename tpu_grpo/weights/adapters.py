"""Adapters among the trainer's leaves, and what a weight is with its adapter.

layers.0.attn.q_proj.w [D, N, H]   w_lora_a [D, rank]   w_lora_b [rank, N, H]      ->  w + a b alpha / rank
"""

from collections.abc import Iterable

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float

A, B = "_lora_a", "_lora_b"
"""How qwix calls the parts, after the weight's name."""


def adapters_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Weight -> the two parts of its adapter, for those that have one."""
    return {name.removesuffix(A): (name, name.removesuffix(A) + B) for name in names if name.endswith(A)}


def merged(weight: Array, a: Float[Array, "*inputs r"], b: Float[Array, "r *outputs"], scale: float) -> Array:
    """The weight [*inputs, *outputs] with its adapter, in float32."""
    product = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), 1, precision=Precision.HIGHEST)
    return weight.astype(jnp.float32) + scale * product
