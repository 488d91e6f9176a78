"""A bit that differs between copies of a parameter is found, and its leaf and devices are named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.weights.sync import CopyCheck

LAYOUT = {"norm": P(), "up": P(None, "tensor"), "only": P(("data", "tensor"), None)}


@pytest.fixture
def leaves() -> dict[str, jax.Array]:
    """Two replicas of two devices: norm has four copies, up two of each half, only has none."""
    mesh = engine_mesh(jax.devices(), 2)
    values = {"norm": jnp.ones(8), "up": jnp.arange(32.0).reshape(4, 8).astype(jnp.bfloat16), "only": jnp.ones((4, 4))}
    return {name: jax.device_put(value, NamedSharding(mesh, LAYOUT[name])) for name, value in values.items()}


def changed(array: jax.Array, device: int, bit: int = 1) -> jax.Array:
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.view(f"uint{8 * data.dtype.itemsize}").flat[3] ^= bit
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def test_equal_copies_pass_and_parts_with_one_holder_are_not_compared(leaves: dict[str, Any]) -> None:
    check = CopyCheck("sampler", leaves)
    check(leaves, Hosts())
    check(leaves | {"only": changed(leaves["only"], 2)}, Hosts())


@pytest.mark.parametrize(
    ("name", "device", "bit"), [("norm", 0, 1), ("norm", 3, 1 << 31), ("up", 1, 1), ("up", 2, 1 << 15)]
)
def test_a_changed_bit_is_named(leaves: dict[str, Any], name: str, device: int, bit: int) -> None:
    check = CopyCheck("sampler", leaves)
    with pytest.raises(LockstepError, match=rf"every copy of the sampler's {name} must be the same.*device {device}"):
        check(leaves | {name: changed(leaves[name], device, bit)}, Hosts())


def test_a_model_without_copies_has_nothing_to_compare(leaves: dict[str, Any]) -> None:
    CopyCheck("trainer", {"only": leaves["only"]})(leaves, Hosts())
