"""Each repair of Tunix's models: what it does, and whether it is still needed."""

import importlib.metadata
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from tests.learner.test_loss import distance
from tests.models.forward import compiled_logprobs, logprobs, trainer_mesh
from tests.models.random_checkpoint import LLAMA3_SCALING, YARN_SCALING, edit_config, write_random
from tpu_grpo.learner.parameters import by_name
from tpu_grpo.models import tunix_repairs as repairs
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.families.family import Remat
from tpu_grpo.models.reference import reference_logprobs
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.errors import ConfigError

POSITIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen3": ({"rope_theta": 1e6}, {"rope_theta": 1e4}, {"rope_theta": 1e4, "rope_scaling": YARN_SCALING}),
    "llama": ({"rope_theta": 1e6}, {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING}),
}
MODULES: dict[str, Any] = {"qwen3": qwen3, "llama": llama3}


@pytest.fixture(params=POSITIONS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def directories(tmp_path: Path, family: str) -> list[Path]:
    """Checkpoints that differ in nothing but how they rotate positions."""
    variants = enumerate(POSITIONS[family])
    return [write_random(family, tmp_path / str(i), layers=1, scale=0.2, **positions) for i, positions in variants]


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "block", pytest.param("decoder", marks=pytest.mark.slow)])
def test_models_of_different_positions_live_together(
    directories: list[Path], tokens_BT: np.ndarray, remat: Remat
) -> None:
    mesh = trainer_mesh(1, 1)
    models = [load_model(read_checkpoint(d), mesh, dtype=jnp.float32, remat=remat) for d in directories]
    expected = [reference_logprobs(d, tokens_BT) for d in directories]
    for one, other in itertools.combinations(expected, 2):
        assert np.abs(one - other).max() > 0.1  # so the tolerance below tells them apart
    for i in (*range(len(models)), 0):
        np.testing.assert_allclose(compiled_logprobs(models[i], tokens_BT), expected[i], atol=1e-4, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma2"])
def test_long_rows_are_attended_in_blocks(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 tokens are two blocks. Gemma's first layer has a window, which ends inside the first of them."""
    window: dict[str, Any] = {"sliding_window": 70} if family == "gemma2" else {}
    directory = write_random(family, tmp_path, scale=0.2, **window)
    ids = np.random.default_rng(5).integers(0, 300, (1, 300)).astype(np.int32)
    model = load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    definition, state = nnx.split(model)
    attended = []

    def attend(q: Any, *others: Any) -> Any:
        attended.append(q.shape[1])
        return attend_block(q, *others)

    def gradient() -> Any:
        slopes = jnp.asarray(np.random.default_rng(6).normal(size=(1, 300, 300)), jnp.float32)
        weighed = lambda state: (logprobs(nnx.merge(definition, state), ids) * slopes).sum()  # noqa: E731
        return by_name(jax.jit(jax.grad(weighed))(state))

    attend_block = repairs._attend_block
    monkeypatch.setattr(repairs, "_attend_block", attend)
    np.testing.assert_allclose(compiled_logprobs(model, ids), reference_logprobs(directory, ids), atol=1e-4, rtol=0)
    in_blocks = gradient()
    assert set(attended) == {150}
    monkeypatch.setattr(repairs, "QUERIES", 300)
    assert distance(in_blocks, gradient()) < 2e-6


@pytest.mark.slow
def test_tunix_still_needs_the_repair_of_positions(
    directories: list[Path], family: str, tokens_BT: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When this fails, Tunix honours rope_theta (and rope_scaling) itself: remove the repair."""
    repairs.apply()
    module = MODULES[family]
    monkeypatch.setattr(module, "apply_rope", module.apply_rope.__wrapped__)
    monkeypatch.setattr(module.Attention, "block", module.Attention.block.__wrapped__)
    outputs = []
    for directory in directories:
        checkpoint = read_checkpoint(directory)
        model: Any = load_model(checkpoint, trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
        assert model.config.rope_theta == checkpoint.config.rope_theta
        outputs.append(compiled_logprobs(model, tokens_BT))
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


@pytest.mark.full
def test_qwen2_scales_positions_and_tunix_does_not(
    tmp_path: Path, tokens_BT: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_random("qwen2", tmp_path, layers=1, scale=0.2, rope_theta=1e4, rope_scaling=YARN_SCALING)
    model = load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=jnp.float32, remat="decoder")
    expected = reference_logprobs(directory, tokens_BT)
    np.testing.assert_allclose(compiled_logprobs(model, tokens_BT), expected, atol=5e-5, rtol=0)
    monkeypatch.setattr(qwen2, "_generate_pos_embeddings", qwen2._generate_pos_embeddings.__wrapped__)  # pyrefly: ignore[missing-attribute]
    assert np.abs(compiled_logprobs(model, tokens_BT) - expected).max() > 0.02


def test_tunix_still_needs_the_repair_of_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_random("llama", tmp_path, layers=1)
    model: Any = load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=jnp.bfloat16, remat="none")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    asked = jnp.ones((1, 3), int), jnp.arange(3)[None], None, jnp.tril(jnp.ones((1, 3, 3), bool))
    logits = jax.eval_shape(lambda: model(*asked)[0])
    assert (logits.shape, logits.dtype) == ((1, 3, 300), jnp.float32)
    monkeypatch.setattr(llama3.Llama3, "__call__", llama3.Llama3.__call__.__wrapped__)  # pyrefly: ignore[missing-attribute]
    assert jax.eval_shape(lambda: model(*asked)[0]).dtype == jnp.bfloat16


# --- Gemma -----------------------------------------------------------------------------------------------------------

TUNIX_GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 16, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
"""What Tunix's model computes whatever the checkpoint says: 16 is the width of a head."""
TUNIX_GEMMA3: dict[str, Any] = {"query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6}
GEMMA_REPAIRS: dict[str, tuple[str, Any, str]] = {
    "scores": ("gemma2", gemma.Attention, "block"),
    "norms": ("gemma2", gemma.RMSNorm, "__call__"),
    "logits": ("gemma2", gemma.Embedder, "decode"),
    "norms of Gemma 3": ("gemma3_text", gemma3.RMSNorm, "__call__"),
    "logits of Gemma 3": ("gemma3_text", gemma3.Embedder, "decode"),
}


def without_repair(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> None:
    repairs.apply()
    monkeypatch.setattr(holder, name, getattr(holder, name).__wrapped__)


def gemma_model(directory: Path, dtype: Any = jnp.float32) -> Any:
    return load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=dtype, remat="none")


def called(model: Any, *given: Any) -> Any:
    """What a model returns, by a program that is traced anew."""
    return nnx.jit(lambda model, *given: model(*given))(model, *given)


def left_padded_difference(directory: Path, tokens_BT: np.ndarray, padding: int) -> float:
    """The largest difference to the reference of rows without padding; nothing attends to the padding."""
    rows = np.pad(tokens_BT, ((0, 0), (padding, 0)))
    is_token = np.broadcast_to(np.arange(rows.shape[1]) >= padding, rows.shape)
    mask = np.tril(np.ones((rows.shape[1],) * 2, bool)) & is_token[:, None, :]
    positions = jnp.asarray(np.maximum(np.cumsum(is_token, 1) - 1, 0))
    logits, _ = called(gemma_model(directory), jnp.asarray(rows), positions, None, jnp.asarray(mask))
    found = np.asarray(jax.nn.log_softmax(logits))[:, padding:]
    return float(np.abs(found - reference_logprobs(directory, tokens_BT)).max())


@pytest.mark.parametrize("padding", [*(pytest.param(padding, marks=pytest.mark.slow) for padding in (0, 5)), 20])
def test_gemmas_windows_do_not_count_padding(tmp_path: Path, tokens_BT: np.ndarray, padding: int) -> None:
    directory = write_random("gemma2", tmp_path, scale=0.3)
    assert left_padded_difference(directory, tokens_BT, padding) <= 5e-5


@pytest.mark.slow
def test_tunix_still_needs_the_repair_of_gemmas_windows(
    tmp_path: Path, tokens_BT: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_random("gemma2", tmp_path, scale=0.3, **TUNIX_GEMMA)
    without_repair(monkeypatch, gemma.Attention, "block")
    assert left_padded_difference(directory, tokens_BT, 0) <= 5e-5
    assert left_padded_difference(directory, tokens_BT, 5) > 1  # five tokens of a window of 13 are others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "setting", "holder", "name"),
    [
        ("gemma2", {"query_pre_attn_scalar": 24}, gemma.Attention, "block"),
        ("gemma2", {"rope_theta": 2e4}, gemma.Attention, "block"),
        ("gemma2", {"rms_norm_eps": 1e-1}, gemma.RMSNorm, "__call__"),
        ("gemma3_text", {"query_pre_attn_scalar": 24}, gemma3.Attention, "block"),
        ("gemma3_text", {"rms_norm_eps": 1e-1}, gemma3.RMSNorm, "__call__"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2}, gemma3.Gemma3, "__init__"),
    ],
    ids=str,
)
def test_tunix_still_needs_the_repair_of_gemmas_settings(
    tmp_path: Path,
    tokens_BT: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    setting: dict[str, Any],
    holder: Any,
    name: str,
) -> None:
    """Without it, Tunix's model computes what its own setting gives."""
    plain = TUNIX_GEMMA if family == "gemma2" else {**TUNIX_GEMMA3, "layer_types": ["sliding_attention"] * 2}
    directory = write_random(family, tmp_path, scale=0.3, **plain | setting)
    expected = reference_logprobs(directory, tokens_BT)
    assert np.abs(compiled_logprobs(gemma_model(directory), tokens_BT) - expected).max() <= 5e-5
    without_repair(monkeypatch, holder, name)
    found = compiled_logprobs(gemma_model(directory), tokens_BT)
    edit_config(directory, **plain)
    assert np.abs(found - reference_logprobs(directory, tokens_BT)).max() <= 5e-5
    assert np.abs(found - expected).max() > 0.02


@pytest.mark.full
@pytest.mark.parametrize(("family", "holder", "name"), GEMMA_REPAIRS.values(), ids=GEMMA_REPAIRS)
def test_tunix_still_needs_the_repair_of_gemma_in_bfloat16(
    tmp_path: Path, tokens_BT: np.ndarray, monkeypatch: pytest.MonkeyPatch, family: str, holder: Any, name: str
) -> None:
    """When a case fails, Tunix computes that part in float32 itself: remove its repair."""
    settings: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **TUNIX_GEMMA}
    if family == "gemma3_text":
        settings = TUNIX_GEMMA3
    directory = write_random(family, tmp_path, layers=1, scale=0.3, **settings)
    expected = reference_logprobs(directory, tokens_BT)

    def error() -> float:
        return float(np.abs(compiled_logprobs(gemma_model(directory, jnp.bfloat16), tokens_BT) - expected).mean())

    repaired = error()
    assert repaired < 0.015  # measured 0.012
    without_repair(monkeypatch, holder, name)
    assert error() > 1.1 * repaired  # measured 1.12 times for scores, 1.9 for norms, 3.3 for logits


@pytest.mark.full
def test_a_call_with_a_cache_keeps_tunix_attention(tmp_path: Path, tokens_BT: np.ndarray) -> None:
    directory = write_random("gemma2", tmp_path, scale=0.3, **TUNIX_GEMMA)
    model, (rows, length) = gemma_model(directory), tokens_BT.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    empty = model.init_cache(rows, length, jnp.float32)
    logits, cache = called(model, jnp.asarray(tokens_BT), positions, empty, mask)
    assert cache["layer_0"]["end_index"].tolist() == [length] * rows
    expected = reference_logprobs(directory, tokens_BT)
    assert np.abs(np.asarray(jax.nn.log_softmax(logits)) - expected).max() <= 5e-5


def test_apply_twice_is_apply_once(family: str) -> None:
    repairs.apply()
    module = MODULES[family]
    once = module.apply_rope, module.Attention.block, llama3.Llama3.__call__
    repairs.apply()
    assert (module.apply_rope, module.Attention.block, llama3.Llama3.__call__) == once


def test_calls_outside_attention_keep_tunix_default(family: str) -> None:
    repairs.apply()
    apply_rope = MODULES[family].apply_rope
    x, positions = jnp.ones((1, 8, 1, 4)), jnp.arange(8)[None]
    original = apply_rope.__wrapped__
    np.testing.assert_array_equal(apply_rope(x, positions, 4), original(x, positions, 4, 1_000_000))
    np.testing.assert_array_equal(apply_rope(x, positions, 4, 100), original(x, positions, 4, 100))


def test_positions_are_forgotten_when_attention_fails(directories: list[Path], family: str) -> None:
    model: Any = load_model(read_checkpoint(directories[-1]), trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    attention, apply_rope = model.layers[0].attn, MODULES[family].apply_rope
    with pytest.raises(ValueError, match="Size of label"):
        attention.block(jnp.ones((1, 2, 7)), None, None, None)
    x, positions = jnp.ones((1, 8, 1, 4)), jnp.arange(8)[None]
    np.testing.assert_array_equal(apply_rope(x, positions, 4), apply_rope.__wrapped__(x, positions, 4))


def test_another_version_must_be_reviewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.8" if name == "google-tunix" else "?")
    with pytest.raises(ConfigError, match=r"google-tunix must be 0\.1\.7, got 0\.1\.8; .*review the repairs"):
        repairs.apply()
