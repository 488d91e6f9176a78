"""One number for all parameters, to tell whether two runs or two hosts hold the same."""

import hashlib

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec


def params_digest(params: nnx.State) -> str:
    """sha256, in hex, over the leaves in the order of their names: name, dtype, shape and bytes of each.

    On several hosts every one must call it: a leaf that is split over hosts is gathered, one leaf at a time.
    """
    digest = hashlib.sha256()
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
    for name in sorted(leaves):
        value = _on_host(leaves[name][...])
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _on_host(value: jax.Array) -> np.ndarray:
    if value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    assert isinstance(value.sharding, NamedSharding)  # the trainer's parameters are on its mesh
    replicated = NamedSharding(value.sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(value))
