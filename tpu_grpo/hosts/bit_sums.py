"""A sum that tells whether two holders of an array hold the same bits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32


def bit_sum(value: Array) -> UInt32[Array, ""]:
    """Read the elements as unsigned integers and add them modulo 2^32: a single changed bit changes the sum."""
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
