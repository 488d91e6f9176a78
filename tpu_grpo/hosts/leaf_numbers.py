"""Computes one number for each of many arrays, such as a checksum that shows whether two copies are identical.

Each number is computed on the devices that hold the array.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

TOGETHER = 16
"""The most arrays (of one shape and dtype) per program: fewer would need more launches, more would compile slowly."""

Number = Callable[[jax.Array], jax.Array]
"""A function from an array to a scalar."""


def leaf_numbers(number: Number, leaves: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the number of each leaf (array), by name. Every host that holds leaves must call this, and gets all.

    Programs run one at a time, because XLA's CPU backend aborts when many programs with collectives run concurrently.
    """
    alike: dict[Any, list[str]] = defaultdict(list)
    for name in sorted(leaves):
        alike[leaves[name].shape, leaves[name].dtype].append(name)
    found: dict[str, np.ndarray] = {}
    for names in (some for group in alike.values() for some in batched(group, TOGETHER)):
        values = jax.device_get(_of_each(number)([leaves[name] for name in names]))
        found |= dict(zip(names, values, strict=True))
    return found


@functools.cache
def _of_each(number: Number) -> Any:
    """Make the jitted function for several leaves; cached per ``number``, so that nothing is compiled twice."""
    return jax.jit(lambda leaves: [number(leaf) for leaf in leaves])


def bit_sum(value: Array) -> UInt32[Array, ""]:
    """Interpret the elements as unsigned integers and add them modulo 2^32; any single changed bit changes the sum."""
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
