"""Computes a number per array for many arrays, such as checksums that tell whether two copies have the same bits.

Each number is computed on the array's devices.
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
"""The most arrays of one shape and type in one program: one each costs a launch, all in one are slow to compile."""

Number = Callable[[jax.Array], jax.Array]
"""Computes a scalar of an array."""


def leaf_numbers(number: Number, leaves: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Compute a number of every leaf, by name; all hosts that hold the leaves must call it, and get all numbers.

    Each program is awaited, because XLA's CPU backend aborts when many programs with collectives run at once.
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
    """Make the program for several leaves; one for all calls, so that none is compiled twice."""
    return jax.jit(lambda leaves: [number(leaf) for leaf in leaves])


def bit_sum(value: Array) -> UInt32[Array, ""]:
    """Read the elements as unsigned integers and add them modulo 2^32: a single changed bit changes the sum."""
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
