"""Each repair of sglang-jax 0.0.2: that it works, and that the library still needs it.

A test named ``..._is_still_needed`` fails when a new release no longer has the fault: delete the repair then.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.random_checkpoint import LLAMA3_SCALING, write_random, write_random_qwen3
from tpu_grpo.errors import ConfigError
from tpu_grpo.rollout import repairs
from tpu_grpo.rollout.engine import engine_mesh


def in_fresh_process(code: str) -> str:
    """What a new interpreter prints last, stdout or stderr."""
    environment = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # else the last line is about that setting
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory):
    from sgl_jax.srt.configs.model_config import ModelConfig

    directory = write_random_qwen3(tmp_path_factory.mktemp("m") / "model", tied=False)
    return ModelConfig(model_path=str(directory), dtype="float32")


def model_class():
    from sgl_jax.srt.models.qwen3 import Qwen3ForCausalLM

    return Qwen3ForCausalLM


def test_the_repaired_version_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert version("sglang-jax") == repairs.REPAIRED_VERSION
    repairs.require_repaired_version()
    monkeypatch.setattr(repairs, "version", lambda _: "0.0.3")
    with pytest.raises(ConfigError, match=r"sglang-jax must be 0\.0\.2, found 0\.0\.3"):
        repairs.require_repaired_version()


def test_importing_native_attention_is_still_needed() -> None:
    broken = in_fresh_process("import sgl_jax.srt.layers.attention.native_backend")
    assert "Duplicate custom PyTreeDef type registration" in broken
    mended = in_fresh_process("from tpu_grpo.rollout import repairs; print(repairs.import_native_attention().__name__)")
    assert mended == "NativeAttention"


def test_building_without_an_ambient_mesh_is_still_needed(model_config) -> None:
    broken = in_fresh_process(  # importing tunix changes the flax setting for the whole process
        "import jax, jax.numpy as jnp\nfrom flax import nnx\n"
        "from sgl_jax.srt.configs.model_config import ModelConfig\n"
        "from sgl_jax.srt.models.qwen3 import Qwen3ForCausalLM as Model\n"
        f"config = ModelConfig(model_path={model_config.model_path!r}, dtype='float32').hf_config\n"
        "nnx.eval_shape(lambda: Model(config, jnp.float32, nnx.Rngs(0), jax.make_mesh((1,), ('tensor',))))"
    )
    assert "auto mesh context or metadata is required" in broken
    mesh = engine_mesh(jax.devices()[:1])
    model = repairs.abstract_model(model_class(), model_config.hf_config, jnp.dtype("float32"), mesh)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model)))


def test_the_output_heads_type_is_still_needed(model_config) -> None:
    mesh = engine_mesh(jax.devices()[:1])
    model: Any = repairs.abstract_model(model_class(), model_config.hf_config, jnp.dtype("float32"), mesh)
    assert model.lm_head.embedding.value.dtype == jnp.bfloat16
    repairs.lm_head_in_model_dtype(model, jnp.dtype("float32"))
    assert model.lm_head.embedding.value.dtype == model.lm_head.dtype == jnp.float32


def rotary(dtype: str):
    from sgl_jax.srt.layers.embeddings import RotaryEmbedding

    return RotaryEmbedding(128, 128, 4096, 1_000_000, True, jnp.dtype(dtype))


def test_rotating_in_float32_is_still_needed() -> None:
    """One query of ones at position 1000: the rotated first half is cos - sin of the exact angle."""
    ones = jnp.ones((1, 1, 128), jnp.bfloat16)
    angles = 1000.0 / 1_000_000.0 ** (np.arange(64) / 64)
    exact = np.cos(angles) - np.sin(angles)

    def error(rope) -> float:
        rotated, _ = rope(jnp.asarray([1000]), ones, ones)
        return float(np.abs(np.asarray(rotated, np.float64)[0, 0, :64] - exact).max())

    assert error(rotary("bfloat16")) > 0.5
    holder = _Holder(rotary("bfloat16"))
    repairs.rope_as_published(holder)
    assert error(holder.rotary_emb) < 0.02  # bfloat16's own rounding of the sum


def test_scaling_positions_is_still_needed() -> None:
    """The library's scaled embedding rotates as one without scaling; the repaired one as Llama 3.1 does."""
    from sgl_jax.srt.layers.embeddings import RotaryEmbedding, get_rope

    def angle(rope) -> np.ndarray:
        """By which each pair of dimensions turned at position 1000."""
        ones = jnp.ones((1, 1, 8), jnp.float32)
        rotated = np.asarray(rope(jnp.asarray([1000]), ones, ones)[0], np.float64)[0, 0]
        return np.arctan2(rotated[4:] - rotated[:4], rotated[:4] + rotated[4:])

    shared = get_rope(8, 8, 4096, 10_000, True, LLAMA3_SCALING, jnp.dtype("float32"))
    plain = RotaryEmbedding(8, 8, 4096, 10_000, True, jnp.dtype("float32"))
    np.testing.assert_array_equal(angle(shared), angle(plain))
    holder = _Holder(shared)
    repairs.rope_as_published(holder)
    # wavelengths 6.3, 62.8, 628, 6283 in an original context of 64: fast, in between, and two slow ones
    turns = 64 * 0.1 / (2 * np.pi)
    halfway = 0.1 * ((turns - 1) / 3 + (4 - turns) / 3 / 8)
    exact = 1000 * np.array([1.0, halfway, 0.01 / 8, 0.001 / 8])
    np.testing.assert_allclose(np.exp(1j * angle(holder.rotary_emb)), np.exp(1j * exact), atol=1e-4)
    np.testing.assert_array_equal(angle(shared), angle(plain))  # other models share it


def experts(library_class: type, devices: int):
    """One layer of 8 experts as the library's model builds it."""
    mesh = engine_mesh(jax.devices()[:devices])
    config = SimpleNamespace(hidden_size=4)
    with nnx.use_eager_sharding(False), mesh:
        return library_class(config, 8, 2, devices, mesh, intermediate_dim=4, dtype=jnp.float32)


def test_our_experts_are_still_needed(tmp_path: Path) -> None:
    from sgl_jax.srt.configs.model_config import ModelConfig
    from sgl_jax.srt.layers.moe import EPMoE
    from sgl_jax.srt.models import qwen3_moe

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'top_k_weights'"):
        experts(EPMoE, 1)(jnp.ones((3, 4)), jnp.ones((3, 8)))
    assert experts(EPMoE, 2).wi_0.value.shape == (4, 4, 4)  # of 8 experts
    directory = write_random("qwen3_moe", tmp_path / "m", layers=1)
    config = ModelConfig(model_path=str(directory), dtype="float32").hf_config
    mesh = engine_mesh(jax.devices()[:2])
    model: Any = repairs.abstract_model(qwen3_moe.Qwen3MoeForCausalLM, config, jnp.dtype("float32"), mesh)
    assert model.model.layers[0].mlp.wi_0.value.shape == (8, 64, 48)
    assert qwen3_moe.EPMoE is EPMoE


class _Holder(nnx.Module):
    def __init__(self, rope) -> None:
        self.rotary_emb = rope


def test_copying_the_config_is_still_needed(model_config) -> None:
    from sgl_jax.srt.configs.model_config import ModelConfig

    shared = model_config.hf_text_config
    own = ModelConfig(model_path=model_config.model_path, dtype="float32")
    own.hf_config, own.hf_text_config = model_config.hf_config, shared
    repairs.own_hf_config(own)
    own.configure_for_tensor_parallel(4)
    assert own.hf_text_config.num_key_value_heads == 4
    assert shared.num_key_value_heads == 2
    shared_user = ModelConfig(model_path=model_config.model_path, dtype="float32")
    shared_user.hf_config, shared_user.hf_text_config = model_config.hf_config, shared
    try:
        shared_user.configure_for_tensor_parallel(4)
        assert shared.num_key_value_heads == 4
    finally:
        shared.num_key_value_heads = 2


def test_the_prefix_trees_clock_is_still_needed() -> None:
    source = in_fresh_process(
        "from sgl_jax.srt.mem_cache import radix_cache as r; print(r.TreeNode().last_access_time)"
    )
    assert "." in source  # seconds
    repairs.count_instead_of_clock()
    from sgl_jax.srt.mem_cache import radix_cache

    first = radix_cache.TreeNode().last_access_time
    clock = radix_cache.time
    repairs.count_instead_of_clock()
    assert radix_cache.time is clock
    assert radix_cache.TreeNode().last_access_time == first + 1


def test_sampling_info_is_put_back() -> None:
    from sgl_jax.srt.managers import schedule_batch

    nothing: Any = SimpleNamespace()
    original = schedule_batch.SamplingBatchInfo
    with repairs.without_sampling_info():
        assert schedule_batch.SamplingBatchInfo.from_schedule_batch(nothing, 5) is not None
        assert schedule_batch.SamplingBatchInfo is repairs.NoSamplingInfo
    assert schedule_batch.SamplingBatchInfo is original


def test_building_in_process_replaces_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_jax.srt.managers import scheduler, tp_worker

    names = [(scheduler, "get_zmq_socket"), (scheduler, "create_device_mesh"), (scheduler, "threading")]
    names += [(scheduler.zmq, "Context"), (tp_worker, "ModelRunner")]
    before = [getattr(module, name) for module, name in names]
    monkeypatch.setenv("SGLANG_CI_SMALL_KV_SIZE", "64")
    mesh = engine_mesh(jax.devices()[:1])
    with pytest.raises(ZeroDivisionError), repairs.in_process(mesh, int):
        import os

        assert "SGLANG_CI_SMALL_KV_SIZE" not in os.environ
        assert tp_worker.ModelRunner is int
        assert scheduler.create_device_mesh(ici_parallelism=[1], dcn_parallelism=[1]) is mesh
        scheduler.threading.Thread(target=None, daemon=True).start()
        raise ZeroDivisionError
    assert before == [getattr(module, name) for module, name in names]


def test_the_librarys_own_pages_are_still_wrong(tmp_path: Path) -> None:
    """Why native attention is refused with pages above one token."""
    from tests.rollout.building import build_engine, disagreement, policy, requests

    directory = write_random_qwen3(tmp_path / "m")
    model = policy(directory)
    asked = requests()
    engine = build_engine(directory, model, attention="native", page_size=4)
    assert disagreement(model, asked, engine.generate(asked)) > 0.1
