"""What the families share: a decoder of pre-norm attention and gated MLP layers with rotary positions.

A family's file puts these leaves together and adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpu_grpo.models.families.family import DecoderConfig, Remat
from tpu_grpo.models.families.leaves import (
    Layout,
    Leaf,
    Shape,
    Transform,
    flatten,
    flatten_kv,
    inputs_first,
    outputs_last,
    same,
    transpose,
    unchanged,
)

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def layer_leaf(
    source: str,
    tensor: str,
    shape: Shape,
    layout: Layout = unchanged,
    transform: Transform = same,
    *,
    target: str | None = None,
) -> Leaf:
    """Make a leaf of every layer that is one tensor, of whose name the sampler's leaf is unless ``target`` is given."""
    targets = ((f"model.layers.*.{target or tensor}", transform),)
    return Leaf(f"layers.*.{source}", (f"model.layers.*.{tensor}",), shape, layout, targets)


def norms(config: DecoderConfig) -> tuple[Leaf, ...]:
    """Return both norms of a layer."""
    return tuple(
        layer_leaf(f"{name}.w", f"{name}.weight", (config.hidden_size,), target=f"{name}.scale")
        for name in ("input_layernorm", "post_attention_layernorm")
    )


def attention(config: DecoderConfig, *, output: str = "o_proj") -> tuple[Leaf, ...]:
    """Return the four projections of a layer's attention; ``output`` is the sampler's name for the last."""
    hidden = config.hidden_size
    return (
        layer_leaf("attn.q_proj.w", "self_attn.q_proj.weight", (config.query_width, hidden), inputs_first, flatten),
        layer_leaf("attn.k_proj.w", "self_attn.k_proj.weight", (config.kv_width, hidden), inputs_first, flatten_kv),
        layer_leaf("attn.v_proj.w", "self_attn.v_proj.weight", (config.kv_width, hidden), inputs_first, flatten_kv),
        layer_leaf(
            "attn.o_proj.w",
            "self_attn.o_proj.weight",
            (hidden, config.query_width),
            outputs_last,
            flatten,
            target=f"self_attn.{output}.weight",
        ),
    )


def qk_norms(config: DecoderConfig) -> tuple[Leaf, ...]:
    """Return the norms of a layer's queries and keys."""
    names = (f"{name}_norm" for name in "qk")
    return tuple(
        layer_leaf(f"attn.{n}.w", f"self_attn.{n}.weight", (config.head_dim,), target=f"self_attn.{n}.scale")
        for n in names
    )


def mlp(config: DecoderConfig) -> tuple[Leaf, ...]:
    """Return the three projections of a layer's gated MLP."""
    return tuple(
        layer_leaf(f"mlp.{name}.kernel", f"mlp.{name}.weight", shape, inputs_first)
        for name, shape in gated_shapes(config.hidden_size, config.intermediate_size).items()
    )


def gated_shapes(hidden: int, width: int) -> dict[str, Shape]:
    """Return the shapes of the three projections of a gated MLP."""
    return {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}


def decoder(
    config: DecoderConfig, layer: Iterable[Leaf], final_norm: tuple[str, str] = ("final_norm.w", "model.norm.scale")
) -> tuple[Leaf, ...]:
    """Put the leaves of a layer between embedding, last norm and, where it is not tied, output head."""
    table = (config.vocab_size, config.hidden_size)
    norm, its_target = final_norm
    head = Leaf("lm_head.w", ("lm_head.weight",), table, inputs_first, (("lm_head.embedding", transpose),))
    return (
        Leaf(
            "embedder.input_embedding",
            ("model.embed_tokens.weight",),
            table,
            unchanged,
            (("model.embed_tokens.embedding", same),),
        ),
        *layer,
        Leaf(norm, ("model.norm.weight",), (config.hidden_size,), unchanged, ((its_target, same),)),
        *(() if config.tie_word_embeddings else (head,)),
    )


DIVISIBLE: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("hidden_size",),
    "tp": ("num_key_value_heads", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size"),
    "tensor": ("num_attention_heads", "intermediate_size"),
}


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
