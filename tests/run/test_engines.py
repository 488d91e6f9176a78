"""Engines with the trainer's parameters: what is freed between rollout and update, and that it comes back."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.engine.building import engine_options, requests, tokens
from tests.models.forward import trainer_mesh
from tests.models.random_checkpoint import write_random_qwen3
from tpu_grpo.config import MeshesSection
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.hosts import Hosts
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.observe.process_metrics import CompilationCounter
from tpu_grpo.run.engines import SyncedEngines
from tpu_grpo.weights.plan import named_leaves

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16


def build(directory: Path, fsdp: int, tp: int, tensor: int) -> tuple[SyncedEngines, nnx.State]:
    """A policy with ``fsdp * tp / tensor`` replicas, and the trainer's parameters, installed."""
    checkpoint = read_checkpoint(write_random_qwen3(directory / "model", layers=LAYERS, kv_heads=KV_HEADS))
    mesh = trainer_mesh(fsdp, tp)
    model = load_model(checkpoint, mesh, dtype=jnp.dtype("float32"), remat="none")
    options = engine_options(prefill_tokens=64)
    replicas = Replicas.build(checkpoint.directory, list(mesh.devices.flat), tensor, options, Hosts())
    engines = SyncedEngines(replicas, checkpoint.weight_rules, MeshesSection(), 16.0, Hosts())
    params = nnx.state(model, nnx.Param)
    engines.install(params)
    return engines, params


def held(engines: SyncedEngines) -> tuple[list[jax.Array], dict[str, list[jax.Array]]]:
    """List the cached layers of all engines, and their parameters by name."""
    every = list(engines.replicas.engines.values())
    cache = [layer for engine in every for layer in engine._runner.token_to_kv_pool.kv_buffer]
    weights = [engine.weights for engine in every]
    return cache, {name: [each[name] for each in weights] for name in weights[0]}


def live_bytes() -> int:
    """Add up all buffers of all devices, each counted once."""
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    return sum({shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in shards}.values())


@pytest.mark.full
@pytest.mark.parametrize(
    ("fsdp", "tp", "tensor"),
    [(1, 1, 1), pytest.param(4, 1, 2, marks=pytest.mark.slow)],
    ids=["mostly aliased", "two replicas with their own"],
)
def test_what_is_released_is_free_and_comes_back(tmp_path: Path, fsdp: int, tp: int, tensor: int) -> None:
    engines, params = build(tmp_path, fsdp, tp, tensor)
    before = tokens(engines.replicas.generate(requests(group=2)))
    cache, weights = held(engines)
    assert engines.sync is not None
    aliased = {move.target for move in engines.sync.moves if move.aliased}
    assert ("model.layers.0.mlp.up_proj.weight" in aliased) == (tensor == 1)
    assert "model.norm.scale" in aliased
    assert "model.layers.0.self_attn.q_proj.weight" not in aliased
    own = [array for name, arrays in weights.items() if name not in aliased for array in arrays]
    own_bytes = sum(shard.data.nbytes for array in own for shard in array.addressable_shards)
    # a slot per token, and one for padding, x heads for K and V, over a replica's devices
    slots = engines.replicas.engines[0].options.cache_tokens + 1
    cached = len(engines.replicas.engines) * LAYERS * slots * 2 * KV_HEADS * HEAD_DIM * 4
    expected = {name: np.asarray(leaf) for name, leaf in named_leaves(params).items()}

    full = live_bytes()
    engines.release()
    assert full - live_bytes() == cached + own_bytes
    assert all(layer.is_deleted() for layer in cache)
    for name, arrays in weights.items():
        assert [array.is_deleted() for array in arrays] == [name not in aliased] * len(arrays), name
    for name, leaf in named_leaves(params).items():
        np.testing.assert_array_equal(np.asarray(leaf), expected[name])
    with pytest.raises(AssertionError, match="install_weights comes before"):
        engines.replicas.generate(requests())

    engines.install(params)
    assert [layer.sharding for layer in held(engines)[0]] == [layer.sharding for layer in cache]
    assert live_bytes() == full
    assert tokens(engines.replicas.generate(requests(group=2))) == before
    with CompilationCounter() as compilations:
        engines.release()
        engines.install(params)
        assert tokens(engines.replicas.generate(requests(group=2))) == before
    assert compilations.count == 0
