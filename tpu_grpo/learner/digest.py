"""Numbers that tell whether two holders of the same parameters hold the same."""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpu_grpo.hosts.leaf_numbers import bit_sum, leaf_numbers


def params_digest(leaves: Mapping[str, jax.Array]) -> str:
    """Compute sha256, in hex, over the leaves in the order of their names: name, dtype, shape and bytes of each.

    On several hosts every one must call it: a leaf that is split over hosts is gathered, one leaf at a time.
    """
    digest = hashlib.sha256()
    for name in sorted(leaves):
        value = whole(leaves[name])
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def checksums(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """Compute the `bit_sum` of every leaf, by name: weaker than a digest, but computed where the leaf is."""
    return {name: int(value) for name, value in leaf_numbers(bit_sum, leaves).items()}


def whole(value: jax.Array) -> np.ndarray:
    """Bring an array's values to every host; all hosts must call it for one that is split over them.

    jax would keep the values that it brings to the host for as long as the array lives, so that a model whose arrays
    were looked at one by one would be held once more. These are let go with what is returned.
    """
    if value.is_fully_addressable or value.is_fully_replicated:
        pieces = [shard.data for shard in value.addressable_shards]
        return np.asarray(jax.make_array_from_single_device_arrays(value.shape, value.sharding, pieces))
    assert isinstance(value.sharding, NamedSharding)  # what the trainer computes is on its mesh
    return np.asarray(_gathering(NamedSharding(value.sharding.mesh, PartitionSpec()))(value))


@functools.cache
def _gathering(sharding: NamedSharding) -> Any:
    """Make the program that lays arrays out anew; one for all calls, so that none is compiled twice."""
    return jax.jit(lambda x: x, out_shardings=sharding)
