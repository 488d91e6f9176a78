"""Numbers that tell whether two holders of the same parameters hold the same."""

import hashlib
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tpu_grpo.hosts.bit_sums import bit_sum

_bit_sum = jax.jit(bit_sum)


def params_digest(params: nnx.State) -> str:
    """Compute sha256, in hex, over the leaves in the order of their names: name, dtype, shape and bytes of each.

    On several hosts every one must call it: a leaf that is split over hosts is gathered, one leaf at a time.
    """
    digest = hashlib.sha256()
    for name, leaf in _named_leaves(params):
        value = whole(leaf)
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def checksums(state: nnx.State) -> dict[str, int]:
    """Compute the `bit_sum` of every leaf, by name: weaker than a digest, but computed where the leaf is.

    One leaf at a time is waited for: XLA's CPU
    backend aborts when many programs with collectives are under way.
    """
    return {name: int(_bit_sum(leaf)) for name, leaf in _named_leaves(state)}


def _named_leaves(state: nnx.State) -> Iterator[tuple[str, jax.Array]]:
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    for name in sorted(leaves):
        yield name, leaves[name][...]


def whole(value: jax.Array) -> np.ndarray:
    """Bring an array's values to every host; all hosts must call it for one that is split over them."""
    if value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    assert isinstance(value.sharding, NamedSharding)  # what the trainer computes is on its mesh
    replicated = NamedSharding(value.sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(value))
