"""Each family's checkpoints: the published ones are accepted, others refused by name; and what is loaded of them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers import AutoConfig

from tests.models.forward import compiled_logprobs, logprobs, trainer_mesh
from tests.models.random_checkpoint import GEMMA, LLAMA3_SCALING, edit_config, write_random, write_sparse
from tpu_grpo.models.checkpoint import check_mesh, check_sampler_mesh, read_checkpoint
from tpu_grpo.models.families import FAMILIES, gemma2 as families_gemma2
from tpu_grpo.models.reference import reference_logprobs
from tpu_grpo.models.tunix_model import load_model
from tpu_grpo.records.errors import ConfigError


def shipped(name: str) -> dict[str, Any]:
    """What configs/models has of a published config.json, or this folder of one that is not shipped."""
    file = Path(__file__).parents[2] / "configs" / "models" / name / "config.json"
    return json.loads((file if file.exists() else Path(__file__).with_name(f"{name}.json")).read_text())


GEMMA2_27B = shipped("gemma-2-2b-it") | {
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
}
PUBLISHED = [
    (shipped("Mistral-7B-v0.3"), 7_248_023_552),
    (shipped("phi-4"), 14_659_507_200),
    (shipped("Qwen2.5-7B-Instruct"), 7_615_616_512),
    (shipped("Llama-3.1-8B-Instruct"), 8_030_261_248),
    (shipped("Qwen3-30B-A3B"), 30_532_122_624),
    (shipped("gemma-2-2b-it"), 2_614_341_888),
    (GEMMA2_27B, 27_227_128_320),
    (shipped("gemma-3-270m-it"), 268_098_176),
]
"""config.json, and the number of parameters that was published with it."""


# --- accepted --------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "parameters"), PUBLISHED, ids=[f"{c['model_type']} {count}" for c, count in PUBLISHED]
)
def test_published_checkpoints_are_accepted(tmp_path: Path, config: dict[str, Any], parameters: int) -> None:
    checkpoint = read_checkpoint(write_sparse(tmp_path, config))
    assert checkpoint.parameter_count == parameters
    assert checkpoint.config.head_dim == config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - set(GEMMA)))
def test_settings_left_out_take_hugging_faces_values(tmp_path: Path, family: str) -> None:
    directory = write_random(family, tmp_path, tied=False, hidden=512, head_dim=128)
    edit_config(directory, head_dim=..., tie_word_embeddings=..., rope_scaling=..., hidden_act=...)
    edit_config(directory, layer_types=["full_attention"] * 2)
    config = read_checkpoint(directory).config
    assert (config.head_dim, config.tie_word_embeddings) == (128, False)


@pytest.mark.parametrize("family", GEMMA[:2])  # transformers 4 has no Gemma 4
def test_gemmas_settings_left_out_take_hugging_faces_values(tmp_path: Path, family: str) -> None:
    directory = write_random(family, tmp_path, layers=13, head_dim=256)
    names = ["head_dim", "tie_word_embeddings", "query_pre_attn_scalar", "sliding_window", "rms_norm_eps", "rope_theta"]
    names += ["attn_logit_softcapping", "final_logit_softcapping"]
    names += ["rope_local_base_freq", "rope_scaling"] if family == "gemma3_text" else []
    edit_config(directory, **dict.fromkeys((*names, "layer_types"), ...))
    edit_config(directory, hidden_activation=..., hidden_act="silu")  # the older setting, which no one reads
    config, theirs = read_checkpoint(directory).config, AutoConfig.for_model(family)
    assert isinstance(config, families_gemma2.Gemma2Config)
    for name in names:
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.has_window == tuple(kind == "sliding_attention" for kind in theirs.layer_types[:13])


def test_gemma2s_layers_may_be_of_any_kind_and_without_caps(tmp_path: Path, tokens_BT: np.ndarray) -> None:
    types = ["full_attention", "full_attention", "sliding_attention"]
    settings: dict[str, Any] = {"layer_types": types, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    directory = write_random("gemma2", tmp_path, layers=3, scale=0.3, **settings)
    model = load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=jnp.float32, remat="none")
    expected = reference_logprobs(directory, tokens_BT)
    assert np.abs(compiled_logprobs(model, tokens_BT) - expected).max() <= 5e-5
    edit_config(directory, layer_types=None)
    assert np.abs(reference_logprobs(directory, tokens_BT) - expected).max() > 0.1


def test_a_head_width_of_null_is_derived(tmp_path: Path) -> None:
    directory = write_random("llama", tmp_path)
    edit_config(directory, head_dim=None)
    assert read_checkpoint(directory).config.head_dim == 16


@pytest.mark.full
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.slow if family == "qwen3" else ()) for family in FAMILIES]
)  # test_tunix_model.py has qwen3's numbers
def test_loaded_on_four_devices_equals_the_reference(tmp_path: Path, tokens_BT: np.ndarray, family: str) -> None:
    directory = write_random(family, tmp_path, tied=family == "gemma4_text", layers=1, scale=0.2, shards=2)
    model = load_model(read_checkpoint(directory), trainer_mesh(2, 2), dtype=jnp.float32, remat="none")
    difference = np.abs(compiled_logprobs(model, tokens_BT) - reference_logprobs(directory, tokens_BT)).max()
    assert difference <= 5e-5


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_stored_and_computed(tmp_path: Path, tokens_BT: np.ndarray, family: str) -> None:
    directory = write_random(family, tmp_path, layers=1)
    model: Any = load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=jnp.bfloat16, remat="none")
    assert getattr(model.config, "dtype", jnp.bfloat16) == jnp.bfloat16  # of families that have a dtype of their own
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    error = np.abs(compiled_logprobs(model, tokens_BT) - reference_logprobs(directory, tokens_BT))
    assert 1e-4 < error.mean() < 0.02  # 8 bits of mantissa


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma2", "gemma3_text"])
def test_every_parameter_learns(tmp_path: Path, tokens_BT: np.ndarray, family: str) -> None:
    """Biases, the router, and every expert."""
    directory = write_random(family, tmp_path, layers=1, scale=0.2)
    model = load_model(read_checkpoint(directory), trainer_mesh(1, 1), dtype=jnp.float32, remat="decoder")

    def loss(model: nnx.Module) -> jax.Array:
        return -jnp.take_along_axis(logprobs(model, tokens_BT)[:, :-1], tokens_BT[:, 1:, None], -1).mean()

    for path, gradient in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(model))):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(gradient).all(), name
        per_expert = gradient if gradient.ndim == 3 and "mlp" in name else gradient[None]
        assert (np.abs(per_expert).max(axis=tuple(range(1, per_expert.ndim))) > 1e-6).all(), name


def test_the_older_name_of_the_scalings_type_is_known(tmp_path: Path) -> None:
    scaling = {name: value for name, value in LLAMA3_SCALING.items() if name != "rope_type"} | {"type": "llama3"}
    assert read_checkpoint(write_random("llama", tmp_path, rope_scaling=scaling)).parameter_count > 0


# --- meshes ----------------------------------------------------------------------------------------------------------


def test_the_trainers_mesh_must_divide_the_experts(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_random("qwen3_moe", tmp_path))
    check_mesh(checkpoint, fsdp=8, tp=2)
    with pytest.raises(ConfigError, match=r"meshes\.trainer\.fsdp must divide num_experts=8 .* got 16; .* 2, 4, 8$"):
        check_mesh(checkpoint, fsdp=16, tp=1)


@pytest.mark.parametrize(
    ("family", "sizes", "tensor", "expected"),
    [
        ("qwen3", {}, 3, r"divide num_attention_heads=4, intermediate_size=128 of .* got 3; .* one of \[1, 2, 4\]"),
        ("qwen2", {"intermediate": 126}, 4, r"divide intermediate_size=126 of .* got 4; .* one of \[1, 2\]"),
        ("qwen3_moe", {"num_experts": 6}, 4, r"divide num_experts=6 of .* got 4; .* one of \[1, 2\]"),
        (
            "llama",
            {"hidden": 96, "heads": 6, "kv_heads": 3, "intermediate": 120},
            2,
            r"divide num_key_value_heads=3 \(or be a multiple of it\) of .* got 2; .* one of \[1, 3, 6\]",
        ),
    ],
)
def test_the_samplers_mesh_must_divide(
    tmp_path: Path, family: str, sizes: dict[str, Any], tensor: int, expected: str
) -> None:
    checkpoint = read_checkpoint(write_random(family, tmp_path, **sizes))
    check_sampler_mesh(checkpoint, 1)
    with pytest.raises(ConfigError, match=r"meshes\.sampler\.tensor must " + expected):
        check_sampler_mesh(checkpoint, tensor)
