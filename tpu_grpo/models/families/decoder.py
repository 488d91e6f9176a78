"""The leaves (parameter arrays) that families share: those of a decoder with pre-norm attention and gated MLP layers.

A family's file combines these leaves and adds its own.
"""

from collections.abc import Iterable, Mapping

from tpu_grpo.models.families.family import DecoderConfig
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


def layer_leaf(
    source: str,
    tensor: str,
    shape: Shape,
    layout: Layout = unchanged,
    transform: Transform = same,
    *,
    target: str | None = None,
) -> Leaf:
    """Describe a leaf that is one tensor of each layer; the sampler's name for it is ``target``, else ``tensor``."""
    targets = ((f"model.layers.*.{target or tensor}", transform),)
    return Leaf(f"layers.*.{source}", (f"model.layers.*.{tensor}",), shape, layout, targets)


def norms(config: DecoderConfig) -> tuple[Leaf, ...]:
    """Return the leaves of the two norms of a layer: before its attention and before its MLP."""
    return tuple(
        layer_leaf(f"{name}.w", f"{name}.weight", (config.hidden_size,), target=f"{name}.scale")
        for name in ("input_layernorm", "post_attention_layernorm")
    )


def attention(config: DecoderConfig, *, output: str = "o_proj") -> tuple[Leaf, ...]:
    """Return the leaves of a layer's four attention projections; ``output`` is the sampler's name for o_proj."""
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
    """Return the leaves of the norms of a layer's queries and keys."""
    return tuple(
        layer_leaf(f"attn.{name}.w", f"self_attn.{name}.weight", (config.head_dim,), target=f"self_attn.{name}.scale")
        for name in ("q_norm", "k_norm")
    )


def mlp(config: DecoderConfig) -> tuple[Leaf, ...]:
    """Return the leaves of the three projections of a layer's gated MLP."""
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
    """List the leaves of a decoder: embedding, layers, last norm and, unless it is tied, the output head."""
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
