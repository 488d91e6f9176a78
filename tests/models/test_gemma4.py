"""Gemma 4: its layers, and checkpoints that also see images."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models.forward import trainer_mesh
from tests.models.gemma4 import SHAPES, write_shape
from tests.models.random_checkpoint import edit_config
from tests.models.test_transformers5 import SAVED
from tpu_grpo.config import ModelSection
from tpu_grpo.learner.parameters import Frozen, freeze_untrained
from tpu_grpo.models.checkpoint import abstract_checkpoint, read_checkpoint, sampler_sizes
from tpu_grpo.models.families.gemma4 import Gemma4Config
from tpu_grpo.models.tunix_model import abstract_model, by_name
from tpu_grpo.records.errors import CheckpointError


def test_layers_are_of_their_kinds_and_have_the_leaves_of_these(tmp_path: Path) -> None:
    """Heads of 16 numbers with a window and 32 without, where keys are values; the last layer never has a window."""
    directory = write_shape(tmp_path, "31b")
    edit_config(directory, layer_types=None)
    checkpoint = abstract_checkpoint(directory)
    config: Any = checkpoint.config
    assert config.has_window == (*[True] * 5, False, True, False)
    assert (config.widest_head, config.query_widths, config.kv_width) == (32, 8 * (6 * 16 + 2 * 32), 64)
    model: Any = abstract_model(checkpoint, trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    leaves = {leaf.source for leaf in checkpoint.family.all_leaves(config)}
    assert leaves == set(by_name(nnx.state(model)))
    assert {f"layers.{i}.attn.k_einsum.w" for i in (5, 7)} == {name for name in leaves if "k_einsum" in name}


def test_the_factor_of_a_layer_is_not_trained(tmp_path: Path) -> None:
    """transformers keeps it in a buffer."""
    checkpoint = abstract_checkpoint(write_shape(tmp_path, "31b"))
    model: Any = abstract_model(checkpoint, trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    freeze_untrained(model, ModelSection())
    assert type(model.layers[0].skip_scale) is Frozen
    assert isinstance(model.layers[0].pre_ffw_norm.scale, nnx.Param)


def test_the_sampler_splits_the_heads_of_both_kinds(tmp_path: Path) -> None:
    """8 query heads; 6 key-value heads with a window and 4 without: 3 devices cannot share the 4, nor 4 the 6."""
    checkpoint = abstract_checkpoint(write_shape(tmp_path, "31b", heads=24, kv_heads=6, num_global_key_value_heads=4))
    assert sampler_sizes(checkpoint) == [1, 2]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_model_that_sees_images_is_read_as_its_text_model(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(SAVED / "gemma4")
    assert (checkpoint.hf_config["model_type"], checkpoint.hf_config["architectures"]) == (
        "gemma4_text",
        ["Gemma4ForCausalLM"],
    )
    assert isinstance(checkpoint.config, Gemma4Config)
    assert (checkpoint.config.global_head_dim, checkpoint.config.global_kv_heads) == (16, 1)
    (note,) = checkpoint.notes
    assert re.match(r"1\d tensors for images are left out \(.*embed_vision.* more\): the text model is trained", note)


def test_what_transformers_5_writes_for_each_layer_is_what_was_published(tmp_path: Path) -> None:
    directory = write_shape(tmp_path, "31b")
    published, types = read_checkpoint(directory).config, SHAPES["31b"]["layer_types"]
    each = {str(i): {"head_dim": 32, "num_key_value_heads": 2} for i, kind in enumerate(types) if kind[0] == "f"}
    edit_config(directory, per_layer_config=each, global_head_dim=..., num_global_key_value_heads=...)
    assert read_checkpoint(directory).config == published
    config = json.loads((directory / "config.json").read_text())
    for wrong in ({**each, "1": {"head_dim": 64}}, {"0": each["1"]}, {**each, "0": each["1"]}):
        edit_config(directory, **config | {"per_layer_config": wrong})
        with pytest.raises(CheckpointError, match="per_layer_config must be null, got "):
            read_checkpoint(directory)
