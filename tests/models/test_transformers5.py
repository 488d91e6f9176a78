"""Checkpoints as transformers 5 saves them, beside what it computes of them; see make_transformers5.py."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.forward import compiled_logprobs, trainer_mesh
from tpu_grpo.models.checkpoint import read_checkpoint
from tpu_grpo.models.families import FAMILIES
from tpu_grpo.models.hf_directory import copy_tokenizer
from tpu_grpo.models.tokenizers import load_tokenizer, stop_token_ids
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.errors import CheckpointError

SAVED = Path(__file__).parent / "transformers5"
NAMES = sorted(path.name for path in SAVED.iterdir() if path.name != "others")
MESSAGES = [{"role": "user", "content": "2+2?"}]


def expected(name: str) -> dict[str, Any]:
    return dict(np.load(SAVED / name / "expected.npz"))


def test_every_family_was_saved() -> None:
    saved = {json.loads((SAVED / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert saved == {*FAMILIES, "gemma3", "gemma4"}


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_model_computes_what_transformers_5_does(name: str) -> None:
    model = load_model(read_checkpoint(SAVED / name), trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    theirs = expected(name)
    found = compiled_logprobs(model, theirs["tokens"].astype(np.int32))[:, 4::5]
    np.testing.assert_allclose(found, jax.nn.log_softmax(theirs["logits"]), atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_gives_the_ids_of_transformers_5(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    theirs = expected(name)
    copy_tokenizer(SAVED / name, tmp_path)
    for directory in (SAVED / name, tmp_path):
        tokenizer = load_tokenizer(directory)
        assert tokenizer(str(theirs["text"])).input_ids == theirs["ids"].tolist()
        assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True) == theirs["asked"].tolist()
        assert {"<|im_start|>", "<|end|>"} <= set(map(str, tokenizer.all_special_tokens))
    pad, end = (getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id"))
    assert set(stop_token_ids(tokenizer, SAVED / name)) == {257, pad, end}
    copied = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert copied["tokenizer_class"] != "TokenizersBackend"
    assert "extra_special_tokens" not in copied
    assert caplog.messages == []


def test_experts_that_were_saved_as_one_tensor_are_taken_apart(tmp_path: Path) -> None:
    """As ``save_pretrained(save_original_format=False)`` writes them: gate above up, expert after expert."""
    directory = shutil.copytree(SAVED / "qwen3_moe", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: np.stack([tensors.pop(f"{prefix}.{i}.{name}_proj.weight") for i in range(4)])
            for name in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{prefix}.down_proj"] = parts["down"]
    save_file(tensors, directory / "model.safetensors")
    fused, apart = (read_checkpoint(path) for path in (directory, SAVED / "qwen3_moe"))
    assert fused.tensors.keys() == apart.tensors.keys()
    for name, tensor in apart.tensors.items():
        np.testing.assert_array_equal(fused.tensors[name].array(), tensor.array())


def test_a_fused_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    directory = shutil.copytree(SAVED / "phi3", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file(tensors | {name: tensors[name][:-1]}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"3 missing: .*q_proj.*; 1 unexpected: {re.escape(name)};"):
        read_checkpoint(directory)


@pytest.mark.parametrize("model_type", sorted(path.stem for path in (SAVED / "others").iterdir()))
def test_other_architectures_are_refused_with_a_reason_and_a_neighbour(model_type: str, tmp_path: Path) -> None:
    shutil.copy(SAVED / "others" / f"{model_type}.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=rf"got '{model_type}' \(.+\); choose a checkpoint of .*, such as \w+"):
        read_checkpoint(tmp_path)
