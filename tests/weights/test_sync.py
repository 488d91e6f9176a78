"""The plan of a sync and what it moves, on one device; test_meshes.py has the values on every pair of meshes, and
tests/engine the engine's use of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tests.weights.test_meshes import HEADS, HIDDEN, LAYERS, RULES, VOCAB, WIDTH, sampler_specs, trainer_leaves
from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.hosts.sharded_arrays import Spec
from tpu_grpo.models.families.leaves import InputsFirst, WeightRule
from tpu_grpo.observe.process_metrics import CompilationCounter
from tpu_grpo.records.errors import WeightsError
from tpu_grpo.weights.plan import plan_sync
from tpu_grpo.weights.sync import WeightSync

KV_HEADS = 2


@pytest.fixture
def source() -> dict[str, jax.Array]:
    return trainer_leaves(jax.devices()[:1], 1, 1, KV_HEADS)


@pytest.fixture
def target() -> dict[str, Spec]:
    return sampler_specs(jax.devices()[:1], 1, KV_HEADS)


def pointer(array: jax.Array) -> int:
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def test_equal_layouts_are_aliased_and_the_rest_is_counted(
    source: dict[str, jax.Array], target: dict[str, Spec]
) -> None:
    sync = WeightSync(RULES, source, target)
    weights, result = sync(source)
    for name in ("embed", "layers.0.norm"):
        assert pointer(weights[name]) == pointer(source[name])
    reshaped = LAYERS * HIDDEN * WIDTH * (HEADS + KV_HEADS)  # q and k
    assert result.bytes_moved == sync.bytes_moved == 4 * (reshaped + VOCAB * HIDDEN)


def test_one_compilation_for_all_syncs(source: dict[str, jax.Array], target: dict[str, Spec]) -> None:
    sync = WeightSync(RULES, source, target)
    scale = jax.jit(lambda leaves, factor: {name: leaf * factor for name, leaf in leaves.items()})
    before = {}
    for factor in (1.0, 2.0, 3.0):
        scaled = scale(source, factor)
        with CompilationCounter() as compilations:
            weights, _ = sync(scaled)
        assert compilations.count == 0
        np.testing.assert_array_equal(np.asarray(weights["head"]), factor * np.asarray(source["head"]).T)
        assert all(array.is_deleted() for array in before.values())  # what a sync wrote is freed by the next
        before = {move.target: weights[move.target] for move in sync.moves if not move.aliased}
    sync.release()
    assert all(array.is_deleted() for array in before.values())
    assert not any(weights[move.target].is_deleted() for move in sync.moves if move.aliased)


def test_names_that_match_on_one_side_only_are_listed(source: dict[str, jax.Array], target: dict[str, Spec]) -> None:
    other = {name: leaf for name, leaf in source.items() if name != "head"} | {"layers.0.bias": jnp.zeros(3)}
    with pytest.raises(WeightsError) as caught:
        plan_sync(RULES, other, target)
    assert "trainer leaves without a rule ['layers.0.bias']" in str(caught.value)
    assert "sampler leaves that nothing fills ['head']" in str(caught.value)
    with pytest.raises(WeightsError, match=r"rules whose target the sampler lacks \['head'\]"):
        plan_sync(RULES, source, {name: spec for name, spec in target.items() if name != "head"})
    with pytest.raises(WeightsError, match="layers.3.q"):
        plan_sync(RULES, {name: leaf for name, leaf in source.items() if "3" not in name}, target)


def test_shapes_that_do_not_correspond_are_named(source: dict[str, jax.Array], target: dict[str, Spec]) -> None:
    with pytest.raises(WeightsError, match=r"embed \[16, 24\] becomes \[16, 24\], .* wants \[24, 16\]"):
        plan_sync(RULES, source | {"embed": jnp.zeros((HIDDEN, VOCAB))}, target)
    with pytest.raises(WeightsError, match=r"layers.1.q \[16, 8, 5\] cannot become \[16, 32\]"):
        plan_sync(RULES, source | {"layers.1.q": jnp.zeros((HIDDEN, HEADS, WIDTH + 1))}, target)


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (4, 2), (2, 2)])
def test_a_leaf_may_become_several(fsdp: int, tensor: int) -> None:
    """Keys and values that are one leaf, on the same devices and on others, with and without an adapter."""
    rules = [
        WeightRule("layers.*.kv", f"layers.*.{name}", InputsFirst(part), input_axis=-2)
        for part, name in enumerate("kv")
    ]
    rng, layers, rank = np.random.default_rng(0), 2, 3
    mesh = Mesh(np.asarray(jax.devices()[:fsdp]).reshape(fsdp, 1), ("fsdp", "tp"))
    shapes = {"": (2, KV_HEADS, HIDDEN, WIDTH), "_lora_a": (HIDDEN, rank), "_lora_b": (rank, 2, KV_HEADS, WIDTH)}
    specs = {"": P(None, None, "fsdp"), "_lora_a": P("fsdp"), "_lora_b": P()}
    values = {
        f"layers.{i}.kv{part}": rng.normal(size=shape).astype(np.float32)
        for i in range(layers)
        for part, shape in shapes.items()
        if i == 1 or not part  # the second layer has an adapter
    }
    source = {
        name: jax.device_put(value, NamedSharding(mesh, specs[name.partition("kv")[2]]))
        for name, value in values.items()
    }
    devices = jax.devices()[:fsdp] if fsdp != 2 else jax.devices()[2:]
    split = NamedSharding(engine_mesh(devices, len(devices) // tensor), P(None, "tensor"))
    names = [f"layers.{i}.{name}" for i in range(layers) for name in "kv"]
    target = {name: Spec((HIDDEN, KV_HEADS * WIDTH), jnp.dtype("float32"), sharding=split) for name in names}
    sync = WeightSync(rules, source, target, lora_alpha=6.0)
    weights, result = sync(source)
    assert result.bytes_moved == 4 * 2 * layers * HIDDEN * KV_HEADS * WIDTH
    for name in names:
        part, layer = "kv".index(name[-1]), name[:-1]
        expected = values[f"{layer}kv"][part].astype(np.float64)
        if layer == "layers.1.":
            a, b = (values[f"{layer}kv_lora_{x}"] for x in "ab")
            expected = expected + 6.0 / rank * np.einsum("dr,rkh->kdh", a, b[:, part])
        found = np.asarray(weights[name]).reshape(HIDDEN, KV_HEADS, WIDTH).transpose(1, 0, 2)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    for move, leaf in sync.expected(source):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(weights[move.target]))
