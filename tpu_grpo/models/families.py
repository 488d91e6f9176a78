"""Which model families exist. One entry of FAMILIES says all the package needs to know of one.

An entry gives what a published config.json may say, which tensors must follow from it and with which shapes, what a
mesh must divide, and Tunix's model and loader. Only those last two import jax, and only when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import jax
    from flax import nnx
    from jax.typing import DTypeLike

Shape = tuple[int, ...]
Remat = Literal["none", "block", "decoder"]


@dataclass(frozen=True)
class DecoderConfig:
    """The settings of a config.json that decide what a decoder computes, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool


@dataclass(frozen=True)
class Rule:
    """A setting whose other values would change what the model computes, while Tunix would not notice.

    A config.json that leaves the setting out is accepted.
    """

    setting: str
    accepted: str
    """The accepted values in words, to follow "must be"."""
    accepts: Callable[[Any], bool]
    remedy: str


@dataclass(frozen=True)
class Family:
    """One model family."""

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    defaults: Mapping[str, Any]
    """Hugging Face's values for the settings of DecoderConfig that a config.json may leave out."""
    tensor_shapes: Callable[[DecoderConfig], dict[str, Shape]]
    """Every tensor that a checkpoint must hold, by name."""
    ignored_tensors: Callable[[DecoderConfig], frozenset[str]]
    """Tensors that a checkpoint may hold and that Hugging Face ignores as well."""
    divisible: Mapping[str, tuple[str, ...]]
    """For each axis of the trainer's mesh the settings that its size must divide."""
    model_config: Callable[[DecoderConfig, DTypeLike, Remat], Any]
    """Tunix's config of the model; parameters and computation in the dtype."""
    load: Callable[[Path, Any, jax.sharding.Mesh, DTypeLike], nnx.Module]
    """Tunix's loader: directory, its config, mesh, dtype -> model."""


# --- Qwen3 -----------------------------------------------------------------------------------------------------------

_OTHER_CHECKPOINT = "Tunix's model does not have it, so train a checkpoint without it"


def _off(setting: str, remedy: str = _OTHER_CHECKPOINT) -> Rule:
    return Rule(setting, "false, 0 or null", lambda value: not value, remedy)


_QWEN3_RULES = (
    Rule("hidden_act", "silu", lambda value: value == "silu", "Tunix's model always computes silu"),
    Rule(
        "rope_scaling",
        "null",
        lambda value: value is None,
        "Tunix's model has no scaled positions: set it to null to train within the original context length",
    ),
    Rule(
        "rope_parameters",
        "null",
        lambda value: value is None,
        "it is newer than the pinned libraries: move its rope_theta to the top level and remove it, unless it scales",
    ),
    Rule("partial_rotary_factor", "1", lambda value: value in (1, None), "Tunix's model rotates whole heads"),
    _off("attention_bias"),
    _off(
        "use_sliding_window", "Tunix's model attends to everything: set it to false if no sequence exceeds the window"
    ),
    Rule(
        "layer_types",
        "full_attention in every layer",
        lambda value: value is None or (isinstance(value, list) and all(kind == "full_attention" for kind in value)),
        "Tunix's model attends to everything in every layer",
    ),
    _off("attention_dropout", "Tunix's model has no dropout: set it to 0"),
    _off("quantization_config", "train the unquantized checkpoint"),
)


def _qwen3_tensors(config: DecoderConfig) -> dict[str, Shape]:
    hidden, ffw, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffw, hidden),
        "mlp.up_proj": (ffw, hidden),
        "mlp.down_proj": (hidden, ffw),
    }
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _qwen3_ignored(config: DecoderConfig) -> frozenset[str]:
    return frozenset({"lm_head.weight"} if config.tie_word_embeddings else ())


def _qwen3_model_config(config: DecoderConfig, dtype: DTypeLike, remat: Remat) -> Any:
    import jax.numpy as jnp
    from tunix.models.qwen3 import model as qwen3

    return qwen3.ModelConfig(
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_key_value_heads,
        rope_theta=config.rope_theta,  # pyright: ignore[reportArgumentType]  # annotated int; a float is exact too
        norm_eps=config.rms_norm_eps,
        use_tied_embedding=config.tie_word_embeddings,
        remat_config=qwen3.RematConfig[remat.upper()],
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(dtype),
    )


def _qwen3_load(directory: Path, model_config: Any, mesh: jax.sharding.Mesh, dtype: DTypeLike) -> nnx.Module:
    import jax.numpy as jnp
    from tunix.models.qwen3 import params

    return params.create_model_from_safe_tensors(str(directory), model_config, mesh, dtype=jnp.dtype(dtype))


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    rules=_QWEN3_RULES,
    defaults={"head_dim": 128, "tie_word_embeddings": False},
    tensor_shapes=_qwen3_tensors,
    ignored_tensors=_qwen3_ignored,
    divisible={
        "fsdp": ("hidden_size",),
        "tp": (
            "num_key_value_heads",
            "num_attention_heads",
            "head_dim",  # norm weights are split over tp as well
            "hidden_size",
            "intermediate_size",
            "vocab_size",
        ),
    },
    model_config=_qwen3_model_config,
    load=_qwen3_load,
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (QWEN3,)}
"""Every supported family by the ``model_type`` of its config.json."""
