"""Holds what the families share: a decoder of pre-norm attention and gated MLP layers with rotary positions.

A family's file puts these parts together and adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_grpo.models.families.family import DecoderConfig, Remat, Shape
from tpu_grpo.models.families.layouts import WeightRule, flatten, flatten_kv, same, transpose
from tpu_grpo.models.families.publishing import Layout, TensorRule, inputs_first, outputs_last, unchanged

if TYPE_CHECKING:
    import jax
    from flax import nnx
    from jax.typing import DTypeLike

# --- a checkpoint's tensors ------------------------------------------------------------------------------------------


def norm_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shapes of both norms of a layer."""
    return dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (config.hidden_size,))


def attention_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shapes of the four projections of a layer's attention."""
    hidden = config.hidden_size
    return {
        "self_attn.q_proj.weight": (config.query_width, hidden),
        "self_attn.k_proj.weight": (config.kv_width, hidden),
        "self_attn.v_proj.weight": (config.kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, config.query_width),
    }


def mlp_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shapes of the three projections of a layer's MLP."""
    return gated_shapes("mlp", config.hidden_size, config.intermediate_size)


def gated_shapes(name: str, hidden: int, width: int) -> dict[str, Shape]:
    """Return the shapes of the three projections of a gated MLP called ``name``."""
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }


def decoder_shapes(config: DecoderConfig, layer: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of all tensors of a model whose layers are all alike."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def tied_head(config: DecoderConfig) -> frozenset[str]:
    """Name the output head, which a checkpoint with a tied head may hold all the same."""
    return frozenset({"lm_head.weight"} if config.tie_word_embeddings else ())


# --- the trainer's leaves and the sampler's --------------------------------------------------------------------------


def layer_rule(source: str, target: str, transform: Any = same) -> WeightRule:
    """Make a rule for one leaf of every layer."""
    return WeightRule(f"layers.*.{source}", f"model.layers.*.{target}", transform)


EMBEDDINGS_AND_NORMS = (
    WeightRule("embedder.input_embedding", "model.embed_tokens.embedding", same),
    WeightRule("lm_head.w", "lm_head.embedding", transpose),
    WeightRule("final_norm.w", "model.norm.scale", same),
    layer_rule("input_layernorm.w", "input_layernorm.scale"),
    layer_rule("post_attention_layernorm.w", "post_attention_layernorm.scale"),
)
QUERIES_KEYS_VALUES = (
    layer_rule("attn.q_proj.w", "self_attn.q_proj.weight", flatten),
    layer_rule("attn.k_proj.w", "self_attn.k_proj.weight", flatten_kv),
    layer_rule("attn.v_proj.w", "self_attn.v_proj.weight", flatten_kv),
)
ATTENTION = (*QUERIES_KEYS_VALUES, layer_rule("attn.o_proj.w", "self_attn.o_proj.weight", flatten))
QK_NORMS = (
    layer_rule("attn.q_norm.w", "self_attn.q_norm.scale"),
    layer_rule("attn.k_norm.w", "self_attn.k_norm.scale"),
)
MLP = (
    layer_rule("mlp.gate_proj.kernel", "mlp.gate_proj.weight"),
    layer_rule("mlp.up_proj.kernel", "mlp.up_proj.weight"),
    layer_rule("mlp.down_proj.kernel", "mlp.down_proj.weight"),
)

# --- the trainer's leaves and a checkpoint's tensors ------------------------------------------------------------------


def published(source: str, tensor: str, layout: Layout = unchanged) -> TensorRule:
    """Make a rule for one leaf of every layer that is one tensor."""
    return TensorRule(f"layers.*.{source}", (f"model.layers.*.{tensor}.weight",), layout)


def published_decoder(
    config: DecoderConfig, layer: Iterable[TensorRule], final_norm: str = "final_norm.w"
) -> tuple[TensorRule, ...]:
    """Put the rules of a layer between those of embedding, last norm and, where it is not tied, output head."""
    head = TensorRule("lm_head.w", ("lm_head.weight",), inputs_first)
    return (
        TensorRule("embedder.input_embedding", ("model.embed_tokens.weight",), unchanged),
        *layer,
        TensorRule(final_norm, ("model.norm.weight",), unchanged),
        *(() if config.tie_word_embeddings else (head,)),
    )


PUBLISHED_NORMS = tuple(published(f"{name}.w", name) for name in ("input_layernorm", "post_attention_layernorm"))
PUBLISHED_ATTENTION = (
    *(published(f"attn.{name}_proj.w", f"self_attn.{name}_proj", inputs_first) for name in "qkv"),
    published("attn.o_proj.w", "self_attn.o_proj", outputs_last),
)
PUBLISHED_QK_NORMS = tuple(published(f"attn.{name}_norm.w", f"self_attn.{name}_norm") for name in "qk")
PUBLISHED_MLP = tuple(
    published(f"mlp.{name}_proj.kernel", f"mlp.{name}_proj", inputs_first) for name in ("gate", "up", "down")
)

# --- meshes ----------------------------------------------------------------------------------------------------------

DIVISIBLE: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("hidden_size",),
    "tp": ("num_key_value_heads", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size"),
    "tensor": ("num_attention_heads", "intermediate_size"),
}

# --- Tunix -----------------------------------------------------------------------------------------------------------


def tunix_sizes(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields that all of Tunix's ``ModelConfig`` classes have, under their names there."""
    return {
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "embed_dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "num_kv_heads": config.num_key_value_heads,
        "rope_theta": config.rope_theta,  # annotated int there; a float is exact too
        "norm_eps": config.rms_norm_eps,
    }


def tunix_qwen_config(module: str, own_fields: Callable[[Any], dict[str, Any]] = lambda _: {}) -> Any:
    """Make a ``Family.model_config`` that fills the ``ModelConfig`` of one of Tunix's Qwen modules.

    ``own_fields`` takes the family's config and returns fields that are replaced or added.
    """

    def model_config(config: DecoderConfig, dtype: DTypeLike, remat: Remat, flash_block: int | None) -> Any:
        import jax.numpy as jnp

        model: Any = import_module(module)
        fields = tunix_sizes(config) | {
            "use_tied_embedding": config.tie_word_embeddings,
            "remat_config": model.RematConfig[remat.upper()],
            "dtype": jnp.dtype(dtype),
            "param_dtype": jnp.dtype(dtype),
        }
        if flash_block is not None:
            fields |= {"use_flash_attention": True, "flash_attention_block_size": flash_block}
        return model.ModelConfig(**(fields | own_fields(config)))

    return model_config


def tunix_class(module: str, name: str) -> Any:
    """Make a ``Family.model_class`` that imports the class when it is asked for."""
    return lambda: getattr(import_module(module), name)


def tunix_loader(module: str) -> Any:
    """Make a ``Family.load`` that calls ``create_model_from_safe_tensors`` of one of Tunix's modules."""

    def load(directory: Path, model_config: Any, mesh: jax.sharding.Mesh, dtype: DTypeLike) -> nnx.Module:
        import jax.numpy as jnp

        params: Any = import_module(module)
        return params.create_model_from_safe_tensors(str(directory), model_config, mesh, dtype=jnp.dtype(dtype))

    return load
