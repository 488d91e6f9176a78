"""Gemma 3: its layers, and checkpoints that also see images."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import Gemma3Config

from tests.models.forward import trainer_mesh
from tests.models.gemma3 import as_seen_with_images, write_shape
from tests.models.random_checkpoint import edit_config, edit_tensors, write_random
from tests.models.test_gemma import loaded
from tpu_grpo.models.checkpoint import abstract_checkpoint, read_checkpoint
from tpu_grpo.models.families import gemma3 as families_gemma3
from tpu_grpo.models.reference import read_weights
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.errors import CheckpointError

LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.full
def test_embeddings_are_scaled_as_transformers_does(tmp_path: Path) -> None:
    """By the square root of the width, rounded to the dtype of the computation: of 48, 6.9375 in bfloat16."""
    directory, number = write_shape(tmp_path, "1b"), np.array([[7]])
    row = read_weights(directory)["model.embed_tokens.weight"][7]
    for dtype, scale in ((jnp.dtype(jnp.bfloat16), 6.9375), (jnp.dtype(jnp.float32), np.float32(48**0.5))):
        model: Any = load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=dtype, remat="none")
        expected = row.astype(dtype) * np.array(scale, dtype)
        np.testing.assert_array_equal(np.asarray(model.embedder.encode(number))[0, 0], expected)


@pytest.mark.full
def test_layers_are_of_the_kinds_that_the_checkpoint_says(tmp_path: Path) -> None:
    """Tunix repeats its own pattern."""
    assert [layer.attn.attn_type.name == "GLOBAL" for layer in loaded(write_shape(tmp_path / "a", "27b")).layers] == [
        *(True, False, False, False, False, False, True)
    ]
    pattern = loaded(write_shape(tmp_path / "b", "4b", layers=4, sliding_window_pattern=2)).layers
    assert [layer.attn.rope_base_frequency for layer in pattern] == [1e4, 1e6] * 2


# --- checkpoints that also see images ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_model_that_sees_images_is_read_as_its_text_model(tmp_path: Path, prefix: str) -> None:
    plain = read_checkpoint(write_shape(tmp_path / "text", "27b"))
    checkpoint = read_checkpoint(as_seen_with_images(write_shape(tmp_path / "images", "27b"), prefix))
    assert checkpoint.config == plain.config
    assert checkpoint.hf_config == {**checkpoint.hf_config, **plain.hf_config}
    for name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].array(), tensor.array())
    assert checkpoint.tensors.keys() == plain.tensors.keys()
    (note,) = checkpoint.notes
    assert re.match(r"2 tensors for images are left out \(.*multi_modal_projector.w and 1 more\): the text model", note)
    assert plain.notes == []


def test_what_the_text_config_leaves_out_has_transformers_values(tmp_path: Path) -> None:
    """The published 4B says no more than this."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    directory = as_seen_with_images(write_random("gemma3_text", tmp_path, layers=1))
    edit_config(directory, text_config=text | {"model_type": "gemma3_text", "rope_scaling": LINEAR})
    described = abstract_checkpoint(directory)
    theirs: Any = Gemma3Config.from_pretrained(directory).text_config
    for name, value in described.hf_config.items():
        if name in (*described.family.defaults, "max_position_embeddings") and value is not None:
            assert value == getattr(theirs, name, 6), name  # transformers keeps no sliding_window_pattern
    assert isinstance(described.config, families_gemma3.Gemma3Config)
    assert list(described.config.has_window) == [kind == "sliding_attention" for kind in theirs.layer_types]
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight \(expected \[262208, 2560\], got "):
        read_checkpoint(directory)


def test_bases_of_both_kinds_of_layers_come_as_transformers_5_writes_them(tmp_path: Path) -> None:
    directory = write_shape(tmp_path, "4b")
    before = read_checkpoint(directory)
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000}}
    rope |= {"full_attention": {**LINEAR, "rope_theta": 1_000_000}}
    edit_config(directory, rope_parameters=rope, rope_theta=..., rope_local_base_freq=..., rope_scaling=...)
    assert read_checkpoint(directory).config == before.config
    edit_config(directory, rope_theta=5e5)
    with pytest.raises(CheckpointError, match="rope_parameters must be null, got .*; it must hold, for sliding_att"):
        read_checkpoint(directory)


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_vision_tower_alone_is_refused(tmp_path: Path) -> None:
    directory = as_seen_with_images(write_shape(tmp_path, "1b"))
    names = [f"language_model.{name}" for name in read_checkpoint(write_shape(tmp_path / "text", "1b")).tensors]
    edit_tensors(directory, **dict.fromkeys(names))
    told = (
        r"must hold the tensors of a text model, got 2 for images alone: multi_modal_projector.w, vision_tower.w; copy"
    )
    with pytest.raises(CheckpointError, match=told):
        read_checkpoint(directory)


def test_another_quantization_or_architecture_at_the_top_is_refused(tmp_path: Path) -> None:
    directory = as_seen_with_images(write_shape(tmp_path, "1b"))
    config = json.loads((directory / "config.json").read_text())
    edit_config(directory, quantization_config={"bits": 4})
    with pytest.raises(CheckpointError, match="quantization_config must be false, 0 or null, got "):
        read_checkpoint(directory)
    edit_config(directory, **config, quantization_config=...)
    edit_config(directory, architectures=["Gemma3ForSequenceClassification"])
    with pytest.raises(CheckpointError, match="architectures must be .*; choose the causal language model's"):
        read_checkpoint(directory)
