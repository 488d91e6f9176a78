"""Engines with int8 weights sample the policy whose matrices are rounded, and no other."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.engine.building import build_engine, disagreement, engine_options, policy, requests
from tests.models.random_checkpoint import write_random
from tpu_grpo.engine.engine import Engine, engine_mesh
from tpu_grpo.records.errors import ConfigError

MATRICES = 7
"""Those of a layer of Qwen3: four of attention, three of the MLP."""


def rounded(checkpoint: Path, directory: Path) -> Path:
    """A checkpoint whose layers' matrices [outputs, inputs] are rounded to 8 bits by NumPy, a scale for each output."""
    shutil.copytree(checkpoint, directory)
    tensors = load_file(directory / "model.safetensors")
    for name, value in tensors.items():
        if ".layers." in name and value.ndim == 2:
            scales = np.abs(value.astype(np.float64)).max(axis=1, keepdims=True) / 127
            tensors[name] = (np.rint(value / scales) * scales).astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_the_engine_samples_the_rounded_policy(checkpoint: Path, tmp_path: Path) -> None:
    """The trainer gives the same log-probabilities with matrices that NumPy rounded; with its own it does not."""
    engine = build_engine(checkpoint, weights_dtype="int8")
    completions = engine.generate(requests())
    assert disagreement(policy(rounded(checkpoint, tmp_path / "rounded")), requests(), completions) < 1e-4
    assert disagreement(policy(checkpoint), requests(), completions) > 1e-3
    matrices = {name: array for name, array in engine.weights.items() if name.endswith(".weight_q")}
    assert len(matrices) == MATRICES
    assert all(array.dtype == jnp.int8 for array in matrices.values())
    assert min(int(array.min()) for array in matrices.values()) == -127


FAMILIES: list[tuple[str, dict[str, Any], int]] = [
    ("qwen2", {"tied": False}, 4),
    ("qwen3", {"tied": True}, 2),
    ("llama", {"tied": True}, 2),
    ("mistral", {"tied": False}, 1),
    ("phi3", {"tied": False}, 2),
    ("gemma2", {"tied": True, "kv_heads": 4}, 2),
    ("gemma3_text", {"tied": True}, 4),
]


@pytest.mark.full
@pytest.mark.parametrize(("family", "options", "tensor"), FAMILIES)
def test_every_dense_family_and_mesh(family: str, options: dict[str, Any], tensor: int, tmp_path: Path) -> None:
    """With 4 devices, key-value heads are repeated."""
    directory = write_random(family, tmp_path / "model", **options)
    engine = build_engine(directory, tensor=tensor, weights_dtype="int8")
    completions = engine.generate(requests())
    assert disagreement(policy(rounded(directory, tmp_path / "rounded")), requests(), completions) < 1e-4


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    directory = write_random("qwen3_moe", tmp_path / "experts")
    with pytest.raises(ConfigError, match=r"rollout.weights_dtype=int8 needs a model without experts"):
        Engine.build(directory, engine_mesh(jax.devices()[:1]), engine_options(weights_dtype="int8"))


def test_an_engine_of_rounded_weights_takes_fewer_bytes(checkpoint: Path) -> None:
    """A matrix takes a quarter of its bytes in float32, and 4 for each output."""
    whole, small = (build_engine(checkpoint, weights_dtype=kind) for kind in ("auto", "int8"))
    for name, array in small.weights.items():
        if name.endswith(".weight_q"):
            matrix = whole.weights[name.removesuffix("_q")]
            assert array.nbytes * 4 == matrix.nbytes
            assert small.weights[name.removesuffix("_q") + "_scale"].shape == matrix.shape[1:]
