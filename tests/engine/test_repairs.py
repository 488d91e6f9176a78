"""Each repair of sglang-jax 0.1.0rc0: that it works, and that the library still needs it.

A test named ``..._is_still_needed`` fails when a new release no longer has the fault: delete the repair then.
"""

import copy
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.kernels.ragged_paged_attention import ragged_paged_attention_v3
from sgl_jax.srt.layers.embeddings import RotaryEmbedding, get_rope
from sgl_jax.srt.layers.moe import EPMoE
from sgl_jax.srt.managers import schedule_batch, scheduler, tp_worker
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.mem_cache import radix_cache
from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.models import qwen3_moe
from sgl_jax.srt.models.qwen3 import Qwen3ForCausalLM

from tests.models.random_checkpoint import LLAMA3_SCALING, write_random, write_random_qwen3
from tpu_grpo.engine import repairs
from tpu_grpo.engine.engine import engine_mesh
from tpu_grpo.models.families.rope import scaling_of
from tpu_grpo.records.errors import ConfigError


def in_fresh_process(code: str) -> str:
    """What a new interpreter prints last, stdout or stderr."""
    environment = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # else the last line is about that setting
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory):
    directory = write_random_qwen3(tmp_path_factory.mktemp("m") / "model", tied=False)
    return ModelConfig(model_path=str(directory), dtype="float32")


def abstract(model: type, hf_config: Any, mesh: Mesh, split_vocabulary: bool = False) -> Any:
    return repairs.abstract_model(model, hf_config, jnp.dtype("float32"), mesh, split_vocabulary=split_vocabulary)


def test_the_repaired_version_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert version("sglang-jax") == repairs.REPAIRED_VERSION
    repairs.require_repaired_version()
    monkeypatch.setattr(repairs, "version", lambda _: "0.0.3")
    with pytest.raises(ConfigError, match=r"sglang-jax must be 0\.1\.0rc0, found 0\.0\.3"):
        repairs.require_repaired_version()


@pytest.mark.full
def test_building_without_arrays_is_still_needed(model_config) -> None:
    mesh = engine_mesh(jax.devices()[:1])
    with jax.set_mesh(mesh):
        whole = Qwen3ForCausalLM(model_config.hf_config, mesh=mesh, dtype=jnp.dtype("float32"))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(whole)))
    model = abstract(Qwen3ForCausalLM, model_config.hf_config, mesh)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model)))


def test_a_vocabulary_that_does_not_divide_is_still_repaired(model_config) -> None:
    """The library's models shard embedding and output head by rows whatever their number."""
    mesh, odd = engine_mesh(jax.devices()[:2]), copy.deepcopy(model_config.hf_config)
    odd.vocab_size = 511
    with pytest.raises(ValueError, match="does not evenly divide the dimension size 511"):
        abstract(Qwen3ForCausalLM, odd, mesh, split_vocabulary=True)
    model = abstract(Qwen3ForCausalLM, odd, mesh, split_vocabulary=False)
    for embedding in (model.model.embed_tokens.embedding, model.lm_head.embedding):
        assert embedding.get_value().sharding.spec == PartitionSpec(None, None)
    split = abstract(Qwen3ForCausalLM, model_config.hf_config, mesh, split_vocabulary=True)
    assert split.model.embed_tokens.embedding.get_value().sharding.spec == PartitionSpec("tensor", None)


def test_reading_a_changed_config_anew_is_still_needed(tmp_path: Path) -> None:
    path, found = tmp_path / "model", []
    for layers in (1, 2):
        write_random_qwen3(path, tied=False, layers=layers)
        found.append(ModelConfig(model_path=str(path), dtype="float32").num_hidden_layers)
        with repairs.config_of({"model_type": "qwen3"}):
            found.append(ModelConfig(model_path=str(path), dtype="float32").num_hidden_layers)
    assert found == [1, 1, 1, 2]  # the third: the library's own answer of before


def test_scaling_positions_is_still_needed() -> None:
    """The library's scaled embedding rotates as one without scaling; the repaired one as Llama 3.1 does."""

    def angle(rope) -> np.ndarray:
        """By which each pair of dimensions turned at position 1000."""
        ones = jnp.ones((1, 1, 8), jnp.float32)
        rotated = np.asarray(rope(jnp.asarray([1000]), ones, ones)[0], np.float64)[0, 0]
        return np.arctan2(rotated[4:] - rotated[:4], rotated[:4] + rotated[4:])

    shared = get_rope(8, 8, 4096, 10_000, True, LLAMA3_SCALING, jnp.dtype("float32"))
    plain = RotaryEmbedding(8, 8, 4096, 10_000, True, jnp.dtype("float32"))
    np.testing.assert_array_equal(angle(shared), angle(plain))
    holder = _Holder(shared)
    repairs.rope_as_published(holder, jnp.dtype("float32"), scaling_of(LLAMA3_SCALING))
    # wavelengths 6.3, 62.8, 628, 6283 in an original context of 64: fast, in between, and two slow ones
    turns = 64 * 0.1 / (2 * np.pi)
    halfway = 0.1 * ((turns - 1) / 3 + (4 - turns) / 3 / 8)
    exact = 1000 * np.array([1.0, halfway, 0.01 / 8, 0.001 / 8])
    np.testing.assert_allclose(np.exp(1j * angle(holder.rotary_emb)), np.exp(1j * exact), atol=1e-4)
    np.testing.assert_array_equal(angle(shared), angle(plain))  # other models share it


def test_our_experts_are_still_needed(tmp_path: Path) -> None:
    mesh = engine_mesh(jax.devices()[:2])
    with jax.set_mesh(mesh):
        layer = EPMoE(128, 8, 1, 1, mesh, intermediate_dim=128, weight_dtype=jnp.float32, dtype=jnp.float32)
    sharding: Any = layer.wi_0.get_value().sharding
    assert sharding.mesh.axis_names == ("expert", "tensor")
    directory = write_random("qwen3_moe", tmp_path / "m", layers=1)
    config = ModelConfig(model_path=str(directory), dtype="float32", moe_backend="epmoe").hf_config
    config.ep_size, config.moe_backend = 1, "epmoe"
    model = abstract(qwen3_moe.Qwen3MoeForCausalLM, config, engine_mesh(jax.devices()[:2]))
    assert model.model.layers[0].mlp.wi_0.get_value().shape == (8, 64, 48)
    assert qwen3_moe.EPMoE is EPMoE


class _Holder(nnx.Module):
    def __init__(self, rope) -> None:
        self.rotary_emb = rope


@pytest.mark.full
def test_the_prefix_trees_clock_is_still_needed() -> None:
    source = in_fresh_process(
        "from sgl_jax.srt.mem_cache import radix_cache as r; print(r.TreeNode().last_access_time)"
    )
    assert "." in source  # seconds
    repairs.count_instead_of_clock()
    first = radix_cache.TreeNode().last_access_time
    clock = radix_cache.time
    repairs.count_instead_of_clock()
    assert radix_cache.time is clock
    assert radix_cache.TreeNode().last_access_time == first + 1


@pytest.mark.parametrize("page", [1, 4])
def test_slots_that_are_taken_are_still_allocated(page: int) -> None:
    """A row of 8 tokens: the library allocates a slot for the next, and with the repair takes the one that we say."""
    kind: Any = TokenToKVPoolAllocator if page == 1 else PagedTokenToKVPoolAllocator

    def prepared(slots: np.ndarray | None) -> tuple[list[int], int]:
        allocator, table = kind(32, kvcache=None, **({} if page == 1 else {"page_size": page})), ReqToTokenPool(1, 16)
        table.req_to_token[0, :8] = allocator.alloc(8)
        batch, free = ScheduleBatch.__new__(ScheduleBatch), allocator.available_size()
        info = SimpleNamespace(
            reqs=[SimpleNamespace(decode_batch_idx=0, kv_committed_len=8, kv_allocated_len=8)],
            seq_lens=np.array([8]),
            seq_lens_sum=8,
            req_pool_indices=np.array([0]),
            output_ids=np.array([7]),
            sampling_info=repairs.NoSamplingInfo(),
        )
        tree = SimpleNamespace(token_to_kv_pool_allocator=allocator, evict=None, disable=True)
        for name, value in {
            "reqs_info": [info],
            "dp_size": 1,
            "spec_algorithm": None,
            "enable_overlap": False,
            "is_hybrid_recurrent": False,
            "tree_cache": tree,
            "req_to_token_pool": table,
            "token_to_kv_pool_allocator": allocator,
        }.items():
            setattr(batch, name, value)
        with (
            mock.patch.object(ScheduleBatch, "maybe_evict_swa"),
            nullcontext() if slots is None else repairs.slots_taken(slots),
        ):
            assert slots is None or batch.check_decode_mem()
            batch.prepare_for_decode()
        assert table.req_to_token[0, 8] == info.out_cache_loc[0]
        return info.out_cache_loc.tolist(), free - allocator.available_size()

    assert prepared(None)[1] == page
    assert prepared(np.array([23], np.int32)) == ([23], 0)


def test_sampling_info_is_put_back() -> None:
    nothing: Any = SimpleNamespace()
    original = schedule_batch.SamplingBatchInfo
    with repairs.without_sampling_info():
        assert schedule_batch.SamplingBatchInfo.from_schedule_batch(nothing, 5) is not None
        assert schedule_batch.SamplingBatchInfo is repairs.NoSamplingInfo
    assert schedule_batch.SamplingBatchInfo is original


def test_building_in_process_replaces_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(scheduler.Scheduler, "_setup_jit_cache"), (scheduler, "threading"), (tp_worker, "threading")]
    names += [(scheduler.zmq, "Context"), (tp_worker, "ModelRunner")]
    before = [getattr(module, name) for module, name in names]
    monkeypatch.setenv("SGLANG_CI_SMALL_KV_SIZE", "64")
    with pytest.raises(ZeroDivisionError), repairs.in_process(int):
        assert "SGLANG_CI_SMALL_KV_SIZE" not in os.environ
        assert tp_worker.ModelRunner is int
        scheduler.threading.Thread(target=None, daemon=True).start()
        tp_worker.threading.Thread(target=None, daemon=True).start()
        raise ZeroDivisionError
    assert before == [getattr(module, name) for module, name in names]


def test_attention_of_one_case_is_still_needed() -> None:
    """The library runs a kernel for each of two cases, and writes zeros to all of both kernels' buffers."""
    library, blocks = ragged_paged_attention_v3, (1, 16, 1, 16)
    new, lengths = jnp.zeros((4, 1, 128)), np.ones(4, np.int32)
    starts, cache = np.arange(5, dtype=np.int32), jnp.zeros((9, 16, 2, 1, 128))

    def found(attention: Any) -> tuple[list[str], bool]:
        named = partial(attention, d_block_sizes=blocks, m_block_sizes=blocks, vmem_limit_bytes=2**25)
        rows = (lengths, np.zeros(8, np.int32), starts, starts, np.full(3, 4, np.int32))
        text = str(jax.make_jaxpr(named)(jnp.zeros((4, 2, 128)), new, new, cache, *rows, None))
        zeros = re.findall(r"(\w+):i32\[16,3,1,128\] = broadcast_in_dim 0", text)
        return re.findall("name=(RPA.)", text), any(re.search(f"<- .*, {name}\n", text) for name in zeros)

    assert found(library.ragged_paged_attention) == (["RPAd", "RPAm"], True)
    assert found(repairs.attention_of(library.RpaCase.DECODE)) == (["RPAd"], False)
    assert found(repairs.attention_of(library.RpaCase.MIXED)) == (["RPAm"], False)
