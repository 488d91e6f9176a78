"""Arrays that are sharded over devices: how they lie there, and programs that take many of them.

`leaf_numbers` computes a number for each of many arrays, such as a checksum that shows whether two copies are
identical, on the devices that hold the array. `alike` and `from_shards` are also for other programs that take many
arrays, or arrays on other meshes.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, UInt32

TOGETHER = 16
"""The most arrays per program: fewer would need more launches, more would compile slowly. A program that adds arrays
also needs as much temporary memory as they take, and a MiB of code on TPUs."""

Axes = tuple[str, ...]
Spec = jax.ShapeDtypeStruct
Number = Callable[[jax.Array], jax.Array]
"""A function from an array to a scalar."""


def named_sharding(leaf: Array | Spec) -> NamedSharding:
    """Return the sharding of a leaf, which must be a NamedSharding."""
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding


def mesh_axes(leaf: Array | Spec) -> list[Axes]:
    """Return for each dimension of a leaf the axes of its mesh that shard it; () for one that is not sharded."""
    entries = (*named_sharding(leaf).spec, *[None] * len(leaf.shape))[: len(leaf.shape)]
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]


def bytes_per_device(leaf: Array | Spec) -> int:
    """Return the bytes that one device holds of a sharded leaf."""
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def leaf_numbers(number: Number, leaves: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the number of each leaf (array), by name. Every host that holds leaves must call this, and gets all.

    Programs run one at a time, because XLA's CPU backend aborts when many programs with collectives run concurrently.
    """
    found: dict[str, np.ndarray] = {}
    for names in alike({name: leaves[name] for name in sorted(leaves)}):
        values = jax.device_get(_of_each(number)([leaves[name] for name in names]))
        found |= dict(zip(names, values, strict=True))
    return found


def alike[Key](leaves: Mapping[Key, Any]) -> Iterator[tuple[Key, ...]]:
    """Yield the keys of arrays (or descriptions) for one program: at most TOGETHER, of one shape, dtype and sharding.

    Hosts whose arrays have the same keys in the same order get the same groups.
    """
    groups: dict[Any, list[Key]] = defaultdict(list)
    for key, leaf in leaves.items():
        groups[leaf.shape, leaf.dtype, leaf.sharding].append(key)
    return (keys for group in groups.values() for keys in batched(group, TOGETHER))


def from_shards(like: Any, *arrays: jax.Array) -> jax.Array:
    """Make an array with the shape, dtype and sharding of ``like`` from this host's shards of ``arrays``, without a
    copy. Shards on devices outside of the sharding are left out."""
    wanted = like.sharding.device_set
    shards = [shard.data for array in arrays for shard in array.addressable_shards if shard.device in wanted]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards, dtype=like.dtype)


@functools.cache
def _of_each(number: Number) -> Any:
    """Make the jitted function for several leaves; cached per ``number``, so that nothing is compiled twice."""
    return jax.jit(lambda leaves: [number(leaf) for leaf in leaves])


def bit_sum(value: Array) -> UInt32[Array, ""]:
    """Interpret the elements as unsigned integers and add them modulo 2^32; any single changed bit changes the sum."""
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
