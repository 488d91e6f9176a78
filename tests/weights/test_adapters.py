"""Merging adapters on the way to the sampler, and what moves once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.weights.test_meshes import HEADS, HIDDEN, RULES, WIDTH, sampler_specs, trainer_leaves
from tpu_grpo.observe.process_metrics import CompilationCounter
from tpu_grpo.weights.sync import WeightSync

RANK, ALPHA, KV_HEADS = 3, 6.0, 2
ADAPTED = "layers.1.q", "layers.2.k"


def leaves_with_adapters(devices: list[Any], fsdp: int, tp: int, seed: int = 0) -> dict[str, jax.Array]:
    """Queries of one layer and keys of another have an adapter, split as the trainer splits them."""
    leaves = trainer_leaves(devices, fsdp, tp, KV_HEADS)
    for name in ADAPTED:
        sharding = leaves[name].sharding
        assert isinstance(sharding, NamedSharding)
        inputs, heads, _ = (*sharding.spec, None, None)[:3]
        _, count, width = leaves[name].shape
        rng = np.random.default_rng([seed, count])
        for part, shape, spec in (
            ("a", (HIDDEN, RANK), P(inputs, None)),
            ("b", (RANK, count, width), P(None, heads, None)),
        ):
            value = rng.normal(size=shape).astype(np.float32)
            leaves[f"{name}_lora_{part}"] = jax.device_put(value, NamedSharding(sharding.mesh, spec))
    return leaves


def expected(leaves: dict[str, jax.Array], name: str) -> np.ndarray:
    """Merge in float64, as [HIDDEN, heads * WIDTH]."""
    weight, a, b = (np.asarray(leaves[name + part], np.float64) for part in ("", "_lora_a", "_lora_b"))
    return weight.reshape(HIDDEN, -1) + ALPHA / RANK * a @ b.reshape(RANK, -1)


def frozen(leaves: dict[str, jax.Array]) -> set[str]:
    return {name for name in leaves if "_lora_" not in name}


CASES = [
    (layout, fsdp, tp, tensor)
    for layout, sizes, tensors in (("shared", [(4, 1), (2, 2), (1, 1)], (1, 2)), ("split", [(2, 1), (1, 2)], (1, 2)))
    for fsdp, tp in sizes
    for tensor in tensors
    if fsdp * tp % tensor == 0
]


@pytest.mark.full
@pytest.mark.parametrize(("layout", "fsdp", "tp", "tensor"), CASES)
def test_merged_as_numpy_does(layout: str, fsdp: int, tp: int, tensor: int) -> None:
    devices = jax.devices()[: fsdp * tp]
    theirs = devices if layout == "shared" else jax.devices()[2:]
    source, target = leaves_with_adapters(devices, fsdp, tp), sampler_specs(theirs, tensor, KV_HEADS)
    sync = WeightSync(RULES, source, target, lora_alpha=ALPHA, frozen=frozen(source))
    weights, _ = sync(source)
    assert list(weights) == list(target)
    for name in ADAPTED:
        assert weights[name].sharding == target[name].sharding
        np.testing.assert_allclose(np.asarray(weights[name]), expected(source, name), atol=2e-6)
    np.testing.assert_array_equal(
        np.asarray(weights["layers.0.q"]), np.asarray(source["layers.0.q"]).reshape(HIDDEN, HEADS * WIDTH)
    )
    assert sum("merged" in line for line in sync.describe()) == 2


def test_merged_in_float32_and_cast_last() -> None:
    """In bfloat16 throughout, 256 + 1/2 + 1/2 would stay 256."""
    devices = jax.devices()[:1]
    source, target = leaves_with_adapters(devices, 1, 1), sampler_specs(devices, 1, KV_HEADS, "bfloat16")
    name = ADAPTED[0]
    values = {"": 256.0, "_lora_a": 0.5, "_lora_b": 0.5}
    source |= {name + part: jnp.full_like(source[name + part], value, jnp.bfloat16) for part, value in values.items()}
    weights, _ = WeightSync(RULES, source, target, lora_alpha=ALPHA)(source)
    exact = 256 + ALPHA / RANK * 0.25 * RANK  # 257.5, whose nearest bfloat16 is 258
    assert (np.asarray(weights[name]) == np.asarray(exact).astype(jnp.bfloat16)).all()
    assert weights[name].dtype == jnp.bfloat16


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_what_is_frozen_moves_once(layout: str) -> None:
    devices = jax.devices()
    own, theirs = (devices[:2], devices[:2]) if layout == "shared" else (devices[:2], devices[2:])
    source, target = leaves_with_adapters(own, 2, 1), sampler_specs(theirs, 2, KV_HEADS)
    sync = WeightSync(RULES, source, target, lora_alpha=ALPHA, frozen=frozen(source))
    first, result = sync(source)
    assert result.bytes_moved == sync.bytes_moved > 0
    before = {name: array.addressable_shards[0].data.unsafe_buffer_pointer() for name, array in first.items()}
    changed = leaves_with_adapters(own, 2, 1, seed=1)
    changed |= {name: source[name] for name in frozen(source)}
    with CompilationCounter() as compilations:
        second, result = sync(changed)
    assert compilations.count == 0
    assert result.bytes_moved == 4 * HIDDEN * WIDTH * (HEADS + KV_HEADS)
    for name in ADAPTED:
        np.testing.assert_allclose(np.asarray(second[name]), expected(changed, name), atol=2e-6)
    for name in set(target) - set(ADAPTED):
        assert second[name].addressable_shards[0].data.unsafe_buffer_pointer() == before[name]
    sync.release()
    third, result = sync(changed)  # what was freed moves again
    assert result.bytes_moved == sync.bytes_moved
    anew, _ = WeightSync(RULES, changed, target, lora_alpha=ALPHA)(changed)
    for name in target:
        np.testing.assert_array_equal(np.asarray(third[name]), np.asarray(anew[name]))


def test_a_group_keeps_the_bound_with_what_merging_needs() -> None:
    devices = jax.devices()
    source, target = leaves_with_adapters(devices, 4, 1), sampler_specs(devices, 4, KV_HEADS)
    whole = WeightSync(RULES, source, target, lora_alpha=ALPHA)
    bound = whole.temporary_bytes - 1
    cut = WeightSync(RULES, source, target, lora_alpha=ALPHA, temporary_bytes=bound)
    assert len(whole.groups) == 1 < len(cut.groups)
    assert cut.temporary_bytes <= bound
    (one, _), (other, _) = whole(source), cut(source)
    for name in target:
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]))
