"""Gemma 4: the model against float64, its gradients, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.forward import compiled_logprobs, logprobs, trainer_mesh
from tests.models.gemma4 import SHAPES, write_shape
from tests.models.random_checkpoint import edit_config
from tests.models.test_transformers5 import SAVED
from tpu_grpo.config import ModelSection
from tpu_grpo.learner.parameters import Frozen, freeze_untrained
from tpu_grpo.models.checkpoint import abstract_checkpoint, read_checkpoint, sampler_sizes
from tpu_grpo.models.families.family import Remat
from tpu_grpo.models.families.gemma4 import Gemma4Config
from tpu_grpo.models.reference import Weights, read_weights, reference_logprobs
from tpu_grpo.models.tunix_model import abstract_model, by_name, load_model
from tpu_grpo.records.errors import CheckpointError

AGAINST_FLOAT64 = 6e-5
SHORT: dict[str, Any] = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


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
        {"final_logit_softcapping": None},
        {"top_k_experts": 2},
        {"rms_norm_eps": 1e-2},
        *(
            {
                "rope_parameters": {
                    **SHAPES["26b"]["rope_parameters"],
                    kind: {**SHAPES["26b"]["rope_parameters"][kind], **rope},
                }
            }
            for kind, rope in (
                ("sliding_attention", {"rope_theta": 1e5}),
                ("full_attention", {"rope_theta": 1e3}),
                ("full_attention", {"partial_rotary_factor": 1.0}),
            )
        ),
    ],
    ids=str,
)
def test_every_setting_changes_what_is_compared(tmp_path: Path, tokens_BT: np.ndarray, changed: dict[str, Any]) -> None:
    directory = write_shape(tmp_path, "26b", **SHORT)
    before = reference_logprobs(directory, tokens_BT)
    edit_config(directory, **changed)
    assert np.abs(reference_logprobs(directory, tokens_BT) - before).max() > 20 * AGAINST_FLOAT64


@pytest.mark.full
@pytest.mark.parametrize("shape", ["26b", pytest.param("31b", marks=pytest.mark.slow)])
def test_its_gradients_are_the_slopes_of_float64(tmp_path: Path, tokens_BT: np.ndarray, shape: str) -> None:
    """Along a random direction for each kind of tensor; central differences in float64 have errors below 1e-7."""
    directory, tokens_BT = write_shape(tmp_path, shape, **SHORT), tokens_BT[:1, :24]
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
    rng = np.random.default_rng(0)
    for name, slope in slopes.items():
        way = rng.standard_normal(slope.shape)

        def value(step: float, name: str = name, way: np.ndarray = way) -> float:
            return of(reference_logprobs(directory, tokens_BT, changed=weights | {name: weights[name] + step * way}))

        expected = (value(1e-5) - value(-1e-5)) / 2e-5
        assert (slope * way).sum() == pytest.approx(expected, rel=2e-4, abs=2e-6), name


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


@pytest.mark.parametrize(
    ("shape", "settings", "told"),
    [
        ("31b", {"hidden_size_per_layer_input": ...}, "hidden_size_per_layer_input must be 0, and it is left out; sgl"),
        ("31b", {"hidden_size_per_layer_input": 256}, "as E2B and E4B have: take Gemma 4 31B or 26B-A4B, or Gemma 3"),
        ("31b", {"num_kv_shared_layers": 20}, "num_kv_shared_layers must be false, 0 or null, got 20; sglang-jax has"),
        (
            "31b",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention must be null, or vision, got 'all'",
        ),
        ("31b", {"tie_word_embeddings": False}, "tie_word_embeddings must be true, got False; the libraries' head is"),
        ("31b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null, got 50.0; Gemma 4 does not"),
        ("31b", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar must be null or 1, got 256; Gemma 4 does not"),
        ("31b", {"final_logit_softcapping": 0}, "final_logit_softcapping must be null or a number > 0, got 0; "),
        ("31b", {"rope_parameters": {"full_attention": {}}}, "rope_parameters must be for sliding_attention a rope_th"),
        ("31b", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config must be null, got {'1': {'head_dim'"),
        ("31b", {"num_global_key_value_heads": 3}, "num_global_key_value_heads must divide num_attention_heads=8, and"),
        (
            "31b",
            {"num_global_key_value_heads": 0},
            "num_global_key_value_heads must be a whole number >= 1 and < 2**31",
        ),
        ("31b", {"global_head_dim": 33}, "global_head_dim be even, got 2 and 33; copy the model's own config.json aga"),
        (
            "26b",
            {"top_k_experts": 9},
            "with enable_moe_block, sizes must be given, and top_k_experts be <= num_experts",
        ),
        (
            "26b",
            {"moe_intermediate_size": None},
            "with enable_moe_block, sizes must be given, and top_k_experts be <= num_expe",
        ),
        ("31b", {"model_type": "gemma4"}, "its config.json has no text_config, which holds its text model's settings"),
    ],
    ids=str,
)
def test_refused_settings(tmp_path: Path, shape: str, settings: dict[str, Any], told: str) -> None:
    """At the top level, and in the settings of the text model."""
    directory = write_shape(tmp_path, shape)
    edit_config(directory, **settings)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        read_checkpoint(directory)


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
