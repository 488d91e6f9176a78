"""Which trainer leaf becomes which sampler leaf, one table per model family.

Shapes are Tunix's on the left and sglang-jax's on the right: D width, N query heads, K key-value heads, H head width,
F hidden width of the MLP, V vocabulary. Key-value heads are repeated where the sampler has more of them than the
model (more devices than heads): K' is the sampler's number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

Transform = Callable[[Array, tuple[int, ...]], Array]
"""(trainer leaf, shape wanted by the sampler) -> array of that shape."""


def same(leaf: Array, shape: tuple[int, ...]) -> Array:
    """Unchanged."""
    del shape
    return leaf


def transpose(leaf: Array, shape: tuple[int, ...]) -> Array:
    """[D, V] -> [V, D]."""
    del shape
    return leaf.T


def flatten(leaf: Array, shape: tuple[int, ...]) -> Array:
    """[D, N, H] -> [D, N*H], or [N, H, D] -> [N*H, D]."""
    return leaf.reshape(shape)


def flatten_kv(leaf: Array, shape: tuple[int, ...]) -> Array:
    """[D, K, H] -> [D, K'*H], each head repeated K'/K times."""
    heads, width = leaf.shape[1:]
    return jnp.repeat(leaf, shape[1] // (heads * width), axis=1).reshape(shape)


@dataclass(frozen=True)
class Rule:
    """``*`` in both names stands for the layer's number."""

    source: str
    target: str
    transform: Transform


_LAYER, _SAMPLER_LAYER = "layers.*", "transformer.layers.*"

QWEN3 = (
    Rule("embedder.input_embedding", "transformer.embed_tokens.embedding", same),
    Rule("lm_head.w", "lm_head.embedding", transpose),
    Rule("final_norm.w", "transformer.norm.scale", same),
    Rule(f"{_LAYER}.input_layernorm.w", f"{_SAMPLER_LAYER}.input_layernorm.scale", same),
    Rule(f"{_LAYER}.post_attention_layernorm.w", f"{_SAMPLER_LAYER}.post_attention_layernorm.scale", same),
    Rule(f"{_LAYER}.attn.q_norm.w", f"{_SAMPLER_LAYER}.self_attn.q_norm.scale", same),
    Rule(f"{_LAYER}.attn.k_norm.w", f"{_SAMPLER_LAYER}.self_attn.k_norm.scale", same),
    Rule(f"{_LAYER}.attn.q_proj.w", f"{_SAMPLER_LAYER}.self_attn.q_proj.weight", flatten),
    Rule(f"{_LAYER}.attn.k_proj.w", f"{_SAMPLER_LAYER}.self_attn.k_proj.weight", flatten_kv),
    Rule(f"{_LAYER}.attn.v_proj.w", f"{_SAMPLER_LAYER}.self_attn.v_proj.weight", flatten_kv),
    Rule(f"{_LAYER}.attn.o_proj.w", f"{_SAMPLER_LAYER}.self_attn.o_proj.weight", flatten),
    Rule(f"{_LAYER}.mlp.gate_proj.kernel", f"{_SAMPLER_LAYER}.mlp.gate_proj.weight", same),
    Rule(f"{_LAYER}.mlp.up_proj.kernel", f"{_SAMPLER_LAYER}.mlp.up_proj.weight", same),
    Rule(f"{_LAYER}.mlp.down_proj.kernel", f"{_SAMPLER_LAYER}.mlp.down_proj.weight", same),
)

FAMILIES: Mapping[str, tuple[Rule, ...]] = {"qwen3": QWEN3}
"""Model type of config.json -> its rules."""
