"""Tunix's repaired RoPE: what it does, and whether it is still needed."""

import importlib.metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tunix.models.qwen3 import model as qwen3

from tests.models.forward import compiled_logprobs, trainer_mesh
from tests.models.random_checkpoint import write_random_qwen3
from tests.models.reference import reference_logprobs
from tpu_grpo.errors import ConfigError
from tpu_grpo.families import Remat
from tpu_grpo.models import load_model, read_checkpoint, repairs

THETAS = (1e6, 1e4)


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    """Checkpoints that differ in nothing but the base."""
    return [write_random_qwen3(tmp_path / str(theta), rope_theta=theta, layers=1) for theta in THETAS]


@pytest.mark.parametrize("remat", ["none", "block", "decoder"])
def test_models_of_different_theta_live_together(directories: list[Path], tokens_BT: np.ndarray, remat: Remat) -> None:
    mesh = trainer_mesh(1, 1)
    models = [load_model(read_checkpoint(d), mesh, dtype=jnp.float32, remat=remat) for d in directories]
    expected = [reference_logprobs(d, tokens_BT) for d in directories]
    assert np.abs(expected[0] - expected[1]).max() > 0.1  # so the tolerance below tells them apart
    for i in (0, 1, 0):
        np.testing.assert_allclose(compiled_logprobs(models[i], tokens_BT), expected[i], atol=3e-5)


def test_tunix_still_needs_the_repair(
    directories: list[Path], tokens_BT: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When this fails, Tunix honours rope_theta itself: remove the repair."""
    repairs.apply()
    monkeypatch.setattr(qwen3, "apply_rope", qwen3.apply_rope.__wrapped__)  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(qwen3.Attention, "block", qwen3.Attention.block.__wrapped__)  # pyright: ignore[reportFunctionMemberAccess]
    outputs = []
    for directory in directories:
        checkpoint = read_checkpoint(directory)
        config = checkpoint.family.model_config(checkpoint.config, jnp.float32, "none")
        model: Any = checkpoint.family.load(directory, config, trainer_mesh(1, 1), jnp.float32)
        assert model.config.rope_theta == checkpoint.config.rope_theta
        outputs.append(compiled_logprobs(model, tokens_BT))
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_apply_twice_is_apply_once() -> None:
    repairs.apply()
    once = qwen3.apply_rope, qwen3.Attention.block
    repairs.apply()
    assert (qwen3.apply_rope, qwen3.Attention.block) == once


def test_calls_outside_attention_keep_tunix_default() -> None:
    repairs.apply()
    x, positions = jnp.ones((1, 8, 1, 4)), jnp.arange(8)[None]
    original = qwen3.apply_rope.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    np.testing.assert_array_equal(qwen3.apply_rope(x, positions, 4), original(x, positions, 4, 1_000_000))
    np.testing.assert_array_equal(qwen3.apply_rope(x, positions, 4, 100), original(x, positions, 4, 100))


def test_theta_is_forgotten_when_attention_fails(directories: list[Path]) -> None:
    model: Any = load_model(read_checkpoint(directories[1]), trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    attention = model.layers[0].attn
    with pytest.raises(ValueError, match="Size of label"):
        attention.block(jnp.ones((1, 2, 7)), None, None, None)
    x, positions = jnp.ones((1, 8, 1, 4)), jnp.arange(8)[None]
    original = qwen3.apply_rope.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    np.testing.assert_array_equal(qwen3.apply_rope(x, positions, 4), original(x, positions, 4))


def test_another_version_must_be_reviewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.8" if name == "google-tunix" else "?")
    with pytest.raises(ConfigError, match=r"google-tunix must be 0\.1\.7, got 0\.1\.8; .*review the repairs"):
        repairs.apply()
