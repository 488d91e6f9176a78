"""How the KV cache keeps its numbers: in the model's type, or in 8 bits.

    auto    the model's type, so that nothing is lost
    fp8     float8_e4m3fn (Micikevicius et al. 2022, arXiv 2209.05433), without scales: a number from 2^-6 to 448 is off
            by at most 1/16 of itself, a smaller one by at most 2^-10, and a larger one becomes 448
    int8    whole numbers from -127 to 127 times a scale, which every head of a token's key, and of its value, has for
            itself: a number is off by at most 1/254 of the largest of its head. The four bytes of the scale follow the
            head's numbers

What was NaN or infinite reads as NaN in 8 bits.

Gather attention keeps the bits of bfloat16 and float8 in arrays of whole numbers: on a CPU, XLA converted the whole
cache at every write and every read, 0.3 s each for a layer of 80 MB.

Suffixes: D numbers of a head, W numbers of the cache for it.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

KVDtype = Literal["auto", "int8", "fp8"]
FP8 = jnp.dtype(jnp.float8_e4m3fn)
FP8_LARGEST = 448.0
"""The type has no infinity, and a plain conversion makes larger numbers NaN."""
INT8 = jnp.dtype(jnp.int8)
INT8_LARGEST = 127
SCALE_BYTES = 4
BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): FP8}
"""Arrays of these types hold the bits of those."""


def cache_dtype(name: KVDtype, model_dtype: Any) -> jnp.dtype:
    """Return the type of the cache's arrays."""
    return {"auto": jnp.dtype(model_dtype), "fp8": FP8, "int8": INT8}[name]


def bits_of(dtype: jnp.dtype) -> jnp.dtype:
    """Return the type of whole numbers that has the bits of a small float; other types stay as they are."""
    return next((bits for bits, small in BITS.items() if small == dtype), dtype)


def cache_width(head_dim: int, dtype: jnp.dtype) -> int:
    """Return W, the numbers that the cache has for a head of ``head_dim``."""
    return head_dim + (SCALE_BYTES if dtype == INT8 else 0)


def encode(numbers: Float[Array, "*heads D"], dtype: jnp.dtype) -> Shaped[Array, "*heads W"]:
    """Convert keys or values to what a cache of this type keeps."""
    if dtype in BITS:
        return jax.lax.bitcast_convert_type(encode(numbers, BITS[dtype]), dtype)
    if dtype == INT8:
        return _encode_int8(numbers.astype(jnp.float32))
    if dtype == FP8:
        numbers = jnp.where(jnp.isinf(numbers), jnp.nan, jnp.clip(numbers, -FP8_LARGEST, FP8_LARGEST))
    return numbers.astype(dtype)


def decode(kept: Shaped[Array, "*heads W"]) -> Float[Array, "*heads D"]:
    """Convert back; what was kept in 8 bits becomes float32."""
    if kept.dtype in BITS:
        return decode(jax.lax.bitcast_convert_type(kept, BITS[kept.dtype]))
    if kept.dtype == INT8:
        scale = jax.lax.bitcast_convert_type(kept[..., -SCALE_BYTES:], jnp.float32)
        return kept[..., :-SCALE_BYTES].astype(jnp.float32) * scale[..., None]
    return kept.astype(jnp.float32) if kept.dtype == FP8 else kept


def _encode_int8(numbers: Float[Array, "*heads D"]) -> Shaped[Array, "*heads W"]:
    largest = jnp.max(jnp.abs(numbers), axis=-1)
    scale = jnp.where(largest == 0, 1.0, largest / INT8_LARGEST)
    whole = jnp.round(numbers / scale[..., None]).astype(INT8)
    return jnp.concatenate([whole, jax.lax.bitcast_convert_type(scale, INT8)], axis=-1)
