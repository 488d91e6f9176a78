"""Gemma 3: the model against float64, its gradients, and checkpoints that also see images."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers import Gemma3Config

from tests.models.forward import compiled_logprobs, logprobs, trainer_mesh
from tests.models.gemma3 import SHAPES, as_seen_with_images, write_shape
from tests.models.random_checkpoint import edit_config, edit_tensors, write_random
from tpu_grpo.models.checkpoint import abstract_checkpoint, read_checkpoint
from tpu_grpo.models.families import gemma3 as families_gemma3
from tpu_grpo.models.families.family import Remat
from tpu_grpo.models.reference import Weights, read_weights, reference_logprobs
from tpu_grpo.models.tunix_model import by_name, load_model
from tpu_grpo.records.errors import CheckpointError

AGAINST_FLOAT64 = 6e-5
LINEAR = {"rope_type": "linear", "factor": 8.0}


def loaded(directory: Path, remat: Remat = "none") -> Any:
    return load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=jnp.float32, remat=remat)


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_computes_what_float64_does(tmp_path: Path, tokens_BT: np.ndarray, shape: str) -> None:
    directory = write_shape(tmp_path, shape)
    expected = reference_logprobs(directory, tokens_BT)
    assert np.abs(compiled_logprobs(loaded(directory), tokens_BT) - expected).max() <= AGAINST_FLOAT64


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window": 11},
        {"rope_theta": 1e4},
        {"rope_local_base_freq": 1e6},
        {"rope_scaling": None},
        {"query_pre_attn_scalar": 17},
        {"sliding_window_pattern": 5},
        {"layer_types": ["sliding_attention"] * 12},
        {"rms_norm_eps": 1e-2},
    ],
    ids=str,
)
def test_every_setting_changes_what_is_compared(tmp_path: Path, tokens_BT: np.ndarray, changed: dict[str, Any]) -> None:
    directory = write_shape(tmp_path, "4b")
    before = reference_logprobs(directory, tokens_BT)
    edit_config(directory, **changed)
    assert np.abs(reference_logprobs(directory, tokens_BT) - before).max() > 20 * AGAINST_FLOAT64


@pytest.mark.full
@pytest.mark.parametrize("shape", [*(pytest.param(shape, marks=pytest.mark.slow) for shape in ("1b", "4b")), "27b"])
def test_its_gradients_are_the_slopes_of_float64(tmp_path: Path, tokens_BT: np.ndarray, shape: str) -> None:
    """Along a random direction for each kind of tensor; central differences in float64 have errors below 1e-7."""
    directory, tokens_BT = write_shape(tmp_path, shape, layers=7), tokens_BT[:1, :24]
    checkpoint, weights = read_checkpoint(directory), read_weights(directory)

    def of(logps_BTV: Any) -> Any:
        return np.take_along_axis(logps_BTV[:, :-1], tokens_BT[:, 1:, None], -1).mean()

    def loss(model: nnx.Module) -> jax.Array:
        return jnp.take_along_axis(logprobs(model, tokens_BT)[:, :-1], tokens_BT[:, 1:, None], -1).mean()

    gradients = by_name(nnx.jit(nnx.grad(loss))(loaded(directory, "decoder")))
    slopes: Weights = {}
    for leaf in checkpoint.family.all_leaves(checkpoint.config):
        slopes |= leaf.publish(np.asarray(gradients[leaf.source], np.float64))
    assert slopes.keys() == weights.keys()
    rng, kinds = np.random.default_rng(0), {re.sub(r"\.\d+\.", ".*.", name) for name in slopes}
    for kind in sorted(kinds):
        names = [name for name in slopes if re.sub(r"\.\d+\.", ".*.", name) == kind]
        way = {name: rng.standard_normal(slopes[name].shape) for name in names}

        def value(step: float, way: Weights = way) -> float:
            moved = {name: weights[name] + step * along for name, along in way.items()}
            return of(reference_logprobs(directory, tokens_BT, changed=weights | moved))

        expected = (value(1e-5) - value(-1e-5)) / 2e-5
        assert sum((slopes[name] * along).sum() for name, along in way.items()) == pytest.approx(
            expected, rel=2e-4, abs=2e-6
        ), kind


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
    rope["full_attention"] = {**LINEAR, "rope_theta": 1_000_000}
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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be null, got 30.0; neither Gemma 3 nor "),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null, got 50.0; neither Gemma 3 nor "),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope_scaling must be null, or of rope_type linear "),
        ({"rope_scaling": LINEAR | {"factor": 0.5}}, "rope_scaling must be null, or of rope_type linear with factor"),
        ({"rope_scaling": LINEAR | {"factor": True}}, "rope_scaling must be null, or of rope_type linear with factor"),
        ({"rope_scaling": LINEAR | {"more": 1}}, "rope_scaling must be null, or of rope_type linear with factor >= 1 "),
        ({"rope_scaling": 8}, "rope_scaling must be null, or of rope_type linear with factor >= 1 "),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters must be null, got "),
        ({"rope_local_base_freq": 0}, "rope_local_base_freq must be a number > 0 and < 1e38, got 0; "),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number >= 1 and < 2**31, got 0; "),
        ({"sliding_window": None}, "sliding_window must be a whole number >= 1 and < 2**31, got None; "),
        ({"layer_types": ["full_attention"]}, "layer_types must be of num_hidden_layers=8, got 1; "),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false, 0 or null, got True; "),
        ({"hidden_activation": "gelu"}, "hidden_activation must be gelu_pytorch_tanh, got 'gelu'; "),
        ({"model_type": "gemma3"}, "model_type must be one of the supported families"),
    ],
    ids=str,
)
def test_refused_settings(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    """At the top level, and in the settings of the text model."""
    directory = write_shape(tmp_path, "1b")
    edit_config(directory, **settings)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        read_checkpoint(directory)
    if "model_type" not in settings:
        with pytest.raises(CheckpointError, match=re.escape(told)):
            read_checkpoint(as_seen_with_images(directory))


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
