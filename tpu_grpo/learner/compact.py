"""Stores 32-bit values in 8 bits: the optimizer's moments, and what a float32 parameter has beyond bfloat16.

The encodings are FlashOptim's (arXiv 2602.23349). Values along the last axis share a float32 scale in blocks of b:

    first moment     s = max |m|,  x = m / s,  code = round(127 * 2x / (1 + |x|))          signed, fine near 0
    second moment    s = max v,                code = round(255 * sqrt(v / s))             unsigned
    residual         r = value - bfloat16(value), code = round(127 * r / (ulp / 2))        of float32 parameters

An ulp is the distance between neighbouring bfloat16 numbers. A block lies within one shard, so that codes and scales
are sharded like the parameter. The residual is rounded stochastically: a step smaller than its unit, ulp / 254, takes
effect with a probability proportional to the step's size, so that on average no step is lost.

Suffixes: L length of the last axis, b values in a block.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, BFloat16, Float, Float32, Int8, Key

LARGEST_BLOCK = 64
"""The most values that share a scale; the scale's 4 bytes then add half a bit to each value."""
UNSIGNED = ("nu", "nu_max", "v", "e_g", "e_x", "sum_of_squares")
"""optax's field names for values that are never negative: second moments, or what other optimizers have instead."""


class Codes(NamedTuple):
    """An array in 8 bits: int8 for signed values, uint8 for values that are never negative."""

    codes: Array
    """Has the shape of the encoded array, [..., L]."""
    scales: Float32[Array, "..."]
    """The scale of each block, [..., L / b]."""


def encode(values: Float[Array, "*axes"], block: int, *, signed: bool) -> Codes:
    """Encode an array in blocks of ``block`` values along the last axis; ``block`` must divide its length."""
    blocks = values.astype(jnp.float32).reshape(*values.shape[:-1], -1, block)
    scales = jnp.abs(blocks).max(axis=-1)
    share = blocks / jnp.where(scales == 0.0, 1.0, scales)[..., None]
    if signed:
        codes = jnp.round(127.0 * 2.0 * share / (1.0 + jnp.abs(share))).astype(jnp.int8)
    else:
        # A second moment of 0 beside a nonzero first moment would make an unbounded step: only 0 gets the code 0.
        codes = jnp.where(share > 0.0, jnp.maximum(jnp.round(255.0 * jnp.sqrt(share)), 1.0), 0.0).astype(jnp.uint8)
    return Codes(codes.reshape(values.shape), scales)


def decode(coded: Codes) -> Float32[Array, "*axes"]:
    """Decode the codes into values."""
    shape = coded.codes.shape
    codes = coded.codes.astype(jnp.float32).reshape(*coded.scales.shape, -1)
    if coded.codes.dtype == jnp.int8:
        share = codes / 127.0
        values = share / (2.0 - jnp.abs(share))
    else:
        values = jnp.square(codes / 255.0)
    return (values * coded.scales[..., None]).reshape(shape)


def block_size(leaf: Any) -> int:
    """Return b for an array: the largest number up to LARGEST_BLOCK that divides the length of a shard's last axis."""
    length = leaf.sharding.shard_shape(leaf.shape)[-1] if isinstance(leaf.sharding, NamedSharding) else leaf.shape[-1]
    return next(size for size in range(min(LARGEST_BLOCK, length), 0, -1) if length % size == 0)


def compact(tx: optax.GradientTransformation, blocks: Mapping[str, int]) -> optax.GradientTransformation:
    """Wrap an optax transformation to keep its state's parameter-shaped arrays in 8 bits between updates.

    ``blocks`` maps parameter names to block sizes; parameters are a flat dict by name.
    """

    def init(params: optax.Params) -> Any:
        return _encoded(tx.init(params), blocks, params)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, Any]:
        updates, state = tx.update(updates, _decoded(state), params)
        return updates, _encoded(state, blocks, params)

    return optax.GradientTransformation(init, update)


def parameter_name(path: tuple[Any, ...]) -> str | None:
    """Return the name of the parameter that the array at ``path`` in an optimizer's state belongs to, or None."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return names[-1] if names else None


def _encoded(state: Any, blocks: Mapping[str, int], params: Any) -> Any:
    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        name = parameter_name(path)
        # the name may also be that of a group of parameters, such as "muon" of optax.partition
        if name is None or name not in params or value.shape != params[name].shape:
            return value
        fields = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
        return encode(value, blocks[name], signed=fields.isdisjoint(UNSIGNED))

    return jax.tree_util.tree_map_with_path(leaf, state)


def _decoded(state: Any) -> Any:
    is_coded: Any = lambda value: isinstance(value, Codes)  # noqa: E731
    return jax.tree.map(lambda value: decode(value) if is_coded(value) else value, state, is_leaf=is_coded)


def split_residual(
    values: Float32[Array, "*axes"], key: Key[Array, ""]
) -> tuple[BFloat16[Array, "*axes"], Int8[Array, "*axes"]]:
    """Split values into bfloat16 and a residual in units of ulp / 254; only the residual is rounded stochastically."""
    rounded = values.astype(jnp.bfloat16)
    units = (values - rounded.astype(jnp.float32)) / _half_ulp(rounded) * 127.0
    noise = jax.random.uniform(key, values.shape)
    return rounded, jnp.clip(jnp.floor(units + noise), -127, 127).astype(jnp.int8)


def join_residual(rounded: BFloat16[Array, "*axes"], residual: Int8[Array, "*axes"]) -> Float32[Array, "*axes"]:
    """Return the values that `split_residual` split, up to the rounding of the residual."""
    return rounded.astype(jnp.float32) + residual.astype(jnp.float32) / 127.0 * _half_ulp(rounded)


def _half_ulp(rounded: BFloat16[Array, "*axes"]) -> Float32[Array, "*axes"]:
    """Return half the distance between neighbouring bfloat16 numbers: 2^(e - 8) for the exponent e."""
    bits = jax.lax.bitcast_convert_type(rounded, jnp.uint16)
    exponent = jnp.maximum((bits >> 7) & 0xFF, 9).astype(jnp.uint32)  # from 9 on, half an ulp is a normal number
    return jax.lax.bitcast_convert_type((exponent - 8) << 23, jnp.float32)
