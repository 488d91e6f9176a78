"""Reading and verifying checkpoints: what is accepted, and every refusal with its message."""

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.goldens import cases, compare
from tests.models import gemma4
from tests.models.gemma3 import as_seen_with_images
from tests.models.random_checkpoint import (
    edit_config,
    edit_tensors,
    published_shapes,
    write_random,
    write_random_qwen3,
    write_sparse,
)
from tpu_grpo.models.checkpoint import check_mesh, read_checkpoint
from tpu_grpo.records.errors import CheckpointError, ConfigError

MISTAKES = Path(__file__).with_name("mistakes.txt")
QWEN3_0P6B = Path(__file__).parents[2] / "configs" / "models" / "Qwen3-0.6B" / "config.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_random_qwen3(tmp_path / "model")


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(directory)
    return str(caught.value)


# --- accepted --------------------------------------------------------------------------------------------------------


def test_qwen3_0p6b_is_accepted(tmp_path: Path) -> None:
    published = json.loads(QWEN3_0P6B.read_text())
    write_sparse(tmp_path, published)
    started = time.monotonic()
    checkpoint = read_checkpoint(tmp_path)
    assert time.monotonic() - started < 5
    assert checkpoint.parameter_count == 151936 * 1024 + 28 * 15_730_944 + 1024
    assert checkpoint.hf_config == published
    check_mesh(checkpoint, fsdp=16, tp=8)


def test_reading_needs_no_jax(directory: Path) -> None:
    code = (
        "import sys, pathlib; from tpu_grpo.models import checkpoint;"
        "checkpoint.check_mesh(checkpoint.read_checkpoint(pathlib.Path(sys.argv[1])), 2, 2);"
        "assert not {'jax', 'tunix', 'flax'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True)


# --- meshes ----------------------------------------------------------------------------------------------------------


def test_mesh_sizes_must_divide(directory: Path) -> None:
    checkpoint = read_checkpoint(directory)
    check_mesh(checkpoint, fsdp=64, tp=2)
    with pytest.raises(ConfigError, match=r"meshes\.trainer\.tp must divide num_key_value_heads=2 .* got 4; .*: 1, 2$"):
        check_mesh(checkpoint, fsdp=1, tp=4)
    with pytest.raises(ConfigError, match=r"fsdp must divide hidden_size=64 .* got 3; .*: 1, 2, 4, 8, 16, 32, 64$"):
        check_mesh(checkpoint, fsdp=3, tp=1)


# --- refused: config.json --------------------------------------------------------------------------------------------


def test_missing_directory(tmp_path: Path) -> None:
    assert f"model.path must be a checkpoint directory on this machine, got {tmp_path / 'x'}" in refusal(tmp_path / "x")


def test_missing_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert f"{directory / 'config.json'} is missing; " in refusal(directory)
    (directory / "adapter_config.json").write_text("{}")
    assert f"model.path must be a whole model, got {directory}, which holds adapters alone; merge" in refusal(directory)


@pytest.mark.parametrize(("text", "expected"), [("{", "is not readable JSON: Expecting"), ("[]", "object, got a list")])
def test_broken_config(directory: Path, text: str, expected: str) -> None:
    (directory / "config.json").write_text(text)
    assert expected in refusal(directory)


@pytest.mark.parametrize(("settings", "told"), cases(MISTAKES))
def test_refused_settings(tmp_path: Path, settings: str, told: str) -> None:
    """A family, or a shape of Gemma 4, and what is changed of its config; an ellipsis removes a setting."""
    name, _, changes = settings.partition(" ")
    family, _, shape = name.partition(":")
    directory = write_random(family, tmp_path, **gemma4.SHAPES.get(shape, {}))
    edit_config(directory, **ast.literal_eval(changes))
    compare(MISTAKES, settings, told, refusal(directory).replace(str(directory), "HERE"))
    if family == "gemma3_text" and "model_type" not in changes:  # also in the settings of the text model
        assert refusal(as_seen_with_images(directory)).replace(str(directory), "HERE") == told


def test_refused_numbers(directory: Path) -> None:
    """They are far too long for a file, and for a message."""
    edit_config(directory, rope_theta=10**400)
    assert f"{directory}/config.json: rope_theta must be a number > 0 and < 1e38, got 1000" in refusal(directory)
    yarn = {"rope_type": "yarn", "factor": 10**400, "original_max_position_embeddings": 9}
    edit_config(directory, rope_theta=1e6, rope_scaling=yarn)
    assert f"{directory}/config.json: rope_scaling must be null, or of rope_type llama3 with " in refusal(directory)


# --- refused: tensors ------------------------------------------------------------------------------------------------


def test_tensors_that_do_not_follow_from_the_config(directory: Path) -> None:
    edit_tensors(
        directory,
        **{
            "model.norm.weight": None,
            "model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32),
            "model.layers.1.mlp.up_proj.weight": np.zeros((64, 128), np.float32),
        },
    )
    message = refusal(directory)
    assert "1 missing: model.norm.weight; 1 unexpected: model.layers.0.self_attn.q_proj.bias; " in message
    assert "1 of another shape: model.layers.1.mlp.up_proj.weight (expected [128, 64], got [64, 128]); " in message


def test_long_lists_are_counted(directory: Path) -> None:
    edit_config(directory, num_hidden_layers=4)
    assert re.search(r"22 missing: (model\.layers\.2\.\S+, ){9}model\.layers\.2\.\S+ and 12 more; ", refusal(directory))


def test_untied_checkpoint_needs_its_head(directory: Path) -> None:
    edit_config(directory, tie_word_embeddings=False)
    assert "1 missing: lm_head.weight; " in refusal(directory)


@pytest.mark.parametrize("length", [-100, 20, 4, 0])
def test_truncated_file(tmp_path: Path, length: int) -> None:
    directory = write_random_qwen3(tmp_path, shards=2)
    file = directory / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file: " in refusal(directory)


def test_missing_shard(tmp_path: Path) -> None:
    directory = write_random_qwen3(tmp_path, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert f"{directory} lacks model-00002-of-00003.safetensors, named in model.safe" in refusal(directory)


@pytest.mark.parametrize(("text", "expected"), [("{}", "must hold a weight_map"), ("{", "is not readable JSON")])
def test_broken_index(tmp_path: Path, text: str, expected: str) -> None:
    directory = write_random_qwen3(tmp_path, shards=2)
    (directory / "model.safetensors.index.json").write_text(text)
    assert f"model.safetensors.index.json {expected}" in refusal(directory)


def test_no_safetensors(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert f"{directory} must hold *.safetensors files, got pytorch_model.bin; " in refusal(directory)


def test_a_tensor_in_two_files(directory: Path) -> None:
    (directory / "old.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    message = refusal(directory)
    assert "old.safetensors and model.safetensors both hold model.embed_tokens.weight, " in message
    assert "move the one that does not belong elsewhere" in message


def test_dtypes(directory: Path) -> None:
    """A file may hold several; Tunix's own loader would take all bytes for those of its first tensor's."""
    norm = np.linspace(0, 1, 64, dtype=np.float16)
    edit_tensors(directory, **{"model.norm.weight": norm})
    np.testing.assert_array_equal(read_checkpoint(directory).tensors["model.norm.weight"].array(), norm)
    edit_tensors(directory, **dict.fromkeys(published_shapes(json.loads((directory / "config.json").read_text()))))
    assert "got no tensor; " in refusal(directory)
    edit_tensors(directory, **{"model.norm.weight": np.ones(64, np.int8)})
    assert "must hold tensors of BF16, F16, F32, F64, got I8; " in refusal(directory)
