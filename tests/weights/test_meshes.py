"""Every pair of meshes, colocated and disjoint: leaves land bit for bit, and a round trip gives the trainer's back."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.hosts import Hosts, by_host
from tpu_grpo.models.families.leaves import WeightRule, flatten, flatten_kv, same, transpose
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.weights.plan import group_moves
from tpu_grpo.weights.sync import ALONE, WeightSync

WIDTH, HEADS, HIDDEN, VOCAB, LAYERS = 4, 8, 16, 24, 4
NAMES = ["embed", "head", *(f"layers.{n}.{leaf}" for n in range(LAYERS) for leaf in ("q", "k", "norm"))]
RULES = (
    WeightRule("embed", "embed", same),
    WeightRule("head", "head", transpose),
    WeightRule("layers.*.q", "layers.*.q", flatten),
    WeightRule("layers.*.k", "layers.*.k", flatten_kv),
    WeightRule("layers.*.norm", "layers.*.norm", same),
)


def trainer_leaves(devices: list[Any], fsdp: int, tp: int, kv_heads: int) -> dict[str, jax.Array]:
    mesh = Mesh(np.asarray(devices).reshape(fsdp, tp), ("fsdp", "tp"))
    kv_axis = "tp" if kv_heads % tp == 0 else None
    layout = {
        "embed": ((VOCAB, HIDDEN), P("tp", "fsdp")),
        "head": ((HIDDEN, VOCAB), P("fsdp", "tp")),
        "q": ((HIDDEN, HEADS, WIDTH), P("fsdp", "tp", None)),
        "k": ((HIDDEN, kv_heads, WIDTH), P("fsdp", kv_axis, None)),
        "norm": ((HIDDEN,), P()),
    }
    leaves: dict[str, jax.Array] = {}
    for number, name in enumerate(NAMES):
        shape, spec = layout[name.rpartition(".")[2]]
        values = np.random.default_rng(number).normal(size=shape).astype(np.float32)
        sharding = NamedSharding(mesh, spec)
        leaves[name] = jax.make_array_from_callback(shape, sharding, values.__getitem__, dtype=jnp.float32)
    return leaves


def sampler_specs(
    devices: list[Any], tensor: int, kv_heads: int, dtype: str = "float32"
) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = engine_mesh(devices, len(devices) // tensor)
    kv = max(kv_heads, tensor)
    layout = {
        "embed": ((VOCAB, HIDDEN), P("tensor", None)),
        "head": ((VOCAB, HIDDEN), P()),
        "q": ((HIDDEN, HEADS * WIDTH), P(None, "tensor")),
        "k": ((HIDDEN, kv * WIDTH), P(None, "tensor")),
        "norm": ((HIDDEN,), P()),
    }
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
        for name in NAMES
        for shape, spec in [layout[name.rpartition(".")[2]]]
    }


def back(name: str, leaf: np.ndarray, kv_heads: int) -> np.ndarray:
    """Turn a leaf of the sampler back into the trainer's."""
    match name.rpartition(".")[2]:
        case "head":
            return leaf.T
        case "q":
            return leaf.reshape(HIDDEN, HEADS, WIDTH)
        case "k":
            heads = leaf.reshape(HIDDEN, -1, WIDTH)
            return heads[:, :: heads.shape[1] // kv_heads]
    return leaf


PAIRS = [
    (layout, fsdp, tp, tensor, kv_heads)
    for layout, sizes, tensors in (("shared", [(4, 1), (2, 2), (1, 4)], (1, 2, 4)), ("split", [(2, 1), (1, 2)], (1, 2)))
    for (fsdp, tp), tensor, kv_heads in itertools.product(sizes, tensors, (1, 2, 4))
]


def check_round_trip(layout: str, fsdp: int, tp: int, tensor: int, kv_heads: int, hosts: Hosts = ALONE) -> None:
    """Sync on the devices of all processes; with layout split, the last half of them, by host, is the sampler's."""
    devices = by_host(jax.devices())
    half = len(devices) // 2
    own, theirs = (devices, devices) if layout == "shared" else (devices[:half], devices[half:])
    source = trainer_leaves(own, fsdp, tp, kv_heads)
    values = trainer_leaves(jax.local_devices()[:1], 1, 1, kv_heads)
    target = sampler_specs(theirs, tensor, kv_heads)
    weights, result = WeightSync(RULES, source, target, hosts=hosts)(source)
    assert list(weights) == list(target)
    for name, array in weights.items():
        assert (array.shape, array.sharding) == (target[name].shape, target[name].sharding)
        assert array.sharding.device_set == set(theirs)
        if array.addressable_shards:  # not on a process of the trainer alone
            np.testing.assert_array_equal(back(name, whole(array), kv_heads), values[name])
    aliased = {name for name in source if layout == "shared" and name.endswith("norm")}
    aliased |= {"embed"} if (layout, tp, tensor, fsdp) == ("shared", 4, 4, 1) else set()
    assert result.bytes_moved == sum(spec.size * 4 for name, spec in target.items() if name not in aliased)


def whole(array: jax.Array) -> np.ndarray:
    """Gather an array's values from the shards of all processes that have some."""
    return np.asarray(array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True))


@pytest.mark.full
@pytest.mark.parametrize(("layout", "fsdp", "tp", "tensor", "kv_heads"), PAIRS)
def test_a_round_trip_is_bit_equal(layout: str, fsdp: int, tp: int, tensor: int, kv_heads: int) -> None:
    check_round_trip(layout, fsdp, tp, tensor, kv_heads)


@pytest.mark.parametrize("layout", ["shared", "split"])
@pytest.mark.parametrize(("given", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_casts_on_the_way_round_as_numpy_does(layout: str, given: str, wanted: str) -> None:
    """A wider type holds the same numbers, as the float32 router of a sampler whose trainer computes in bfloat16."""
    devices = jax.devices()
    leaves = trainer_leaves(devices[:2], 2, 1, 2)
    source = {name: jax.device_put(leaf.astype(given), leaf.sharding) for name, leaf in leaves.items()}
    target = sampler_specs(devices[:2] if layout == "shared" else devices[2:], 2, 2, wanted)
    weights, result = WeightSync(RULES, source, target)(source)
    assert result.bytes_moved == sum(spec.size * spec.dtype.itemsize for spec in target.values())  # none is shared
    for name, array in weights.items():
        assert array.dtype == jnp.dtype(wanted)
        np.testing.assert_array_equal(back(name, np.asarray(array), 2), np.asarray(source[name]).astype(wanted))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["shared", "split"])
def test_temporary_memory_stays_within_the_bound(layout: str) -> None:
    """The compiled programs themselves say what they need; equal layers share a program."""
    devices = jax.devices()
    if layout == "shared":
        source, target, bound = trainer_leaves(devices, 4, 1, 2), sampler_specs(devices, 4, 2), 1800
    else:
        source, target, bound = trainer_leaves(devices[:2], 2, 1, 2), sampler_specs(devices[2:], 1, 2), 5000
    whole = WeightSync(RULES, source, target, temporary_bytes=2**30)
    assert len(whole.groups) == 1
    sync = WeightSync(RULES, source, target, temporary_bytes=bound)
    assert len(sync.groups) > 2
    assert 0 < sync.temporary_bytes <= bound < whole.temporary_bytes
    assert len(sync._programs) < len(sync.groups)
    weights, _ = sync(source)
    for name, array in whole(source)[0].items():
        np.testing.assert_array_equal(np.asarray(weights[name]), np.asarray(array))
    with pytest.raises(ConfigError, match=r"meshes.sync_temporary_mib must hold what moving \S+ needs, 0\.0 MiB"):
        WeightSync(RULES, source, target, temporary_bytes=100)


@pytest.mark.full
def test_many_groups_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges of several programs at once would hold all threads of virtual devices: jax then ends the process."""
    monkeypatch.setattr("tpu_grpo.weights.sync.GROUP_BYTES", 1)
    rows = NamedSharding(Mesh(np.asarray(jax.devices()), ("fsdp",)), P("fsdp", None))
    columns = NamedSharding(Mesh(np.asarray(jax.devices()), ("tensor",)), P(None, "tensor"))
    source = {f"layers.{n}.w": jax.device_put(np.full((256, 256), n, np.float32), rows) for n in range(64)}
    target = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=columns) for name, leaf in source.items()}
    sync = WeightSync([WeightRule("layers.*.w", "layers.*.w", same)], source, target)
    assert len(sync.groups) == 64
    for _ in range(5):
        weights, _ = sync(source)
    assert all(np.all(np.asarray(weights[f"layers.{n}.w"]) == n) for n in range(64))


def test_layers_move_together_where_they_fit() -> None:
    devices = jax.devices()
    source, target = trainer_leaves(devices[:2], 2, 1, 2), sampler_specs(devices[:2], 1, 2)
    moves = [move for move in WeightSync(RULES, source, target).moves if not move.aliased]
    layer = 4 * HIDDEN * WIDTH * (HEADS + 2)  # q and k; the norm is aliased
    table = 4 * VOCAB * HIDDEN

    def names(limit: int) -> list[list[str]]:
        return [[move.target for move in group] for group in group_moves(moves, limit)]

    q_and_k = [[f"layers.{n}.q", f"layers.{n}.k"] for n in range(LAYERS)]
    assert names(2 * table) == [["embed", "head"], *q_and_k]
    assert names(2 * layer) == [["embed", "head"], q_and_k[0] + q_and_k[1], q_and_k[2] + q_and_k[3]]
    assert names(table) == [["embed"], ["head"], *([name] for pair in q_and_k for name in pair)]
