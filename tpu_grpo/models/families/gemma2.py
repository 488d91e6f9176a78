"""The family of Gemma 2.

Embeddings are multiplied by the square root of the width. Attention and MLP have a norm before and after them, and
norms multiply by 1 + weight. Attention scores and logits x are soft-capped: cap * tanh(x / cap). Some layers use
sliding-window attention. The output head is the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpu_grpo.models.families.decoder import DIVISIBLE, decoder, layer_leaf, mlp
from tpu_grpo.models.families.family import (
    NO_ATTENTION_BIAS,
    NO_ROPE_SCALING,
    PLAIN,
    DecoderConfig,
    Family,
    SettingRule,
    off,
)
from tpu_grpo.models.families.leaves import InputsFirst, Leaf, Shape, flatten, heads_first, outputs_last

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """The settings of Gemma 2."""

    query_pre_attn_scalar: float
    """Attention scores are divided by the square root of this number."""
    sliding_window: int
    """In a layer with a window, position q attends to the last ``sliding_window`` positions, up to and including q."""
    layer_types: Sequence[str] | None
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None

    @property
    def period(self) -> int:
        """Without ``layer_types``, layers period, 2 * period etc. (counted from 1) attend to everything."""
        return 2

    @property
    def has_window(self) -> tuple[bool, ...]:
        """Whether each layer has a window; the others attend to everything."""
        types, layers = self.layer_types, range(self.num_hidden_layers)
        return tuple((i + 1) % self.period != 0 if types is None else types[i] == SLIDING for i in layers)

    def contradiction(self) -> str | None:
        """Describe contradicting settings, also a ``layer_types`` that does not have one entry for each layer."""
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            return f"layer_types must be of num_hidden_layers={self.num_hidden_layers}, got {len(self.layer_types)}"
        return super().contradiction()


def soft_cap(setting: str) -> SettingRule:
    """Make the rule that a setting is a soft cap, or null."""
    return SettingRule(
        setting,
        "null or a number > 0",
        lambda value: value is None or (type(value) in (int, float) and value > 0),
        "set it to null for no cap",
    )


GEMMA_RULES = (
    *PLAIN,
    NO_ATTENTION_BIAS,
    SettingRule(
        "hidden_activation",
        "gelu_pytorch_tanh",
        lambda value: value == "gelu_pytorch_tanh",
        "the libraries always compute the tanh approximation of gelu",
    ),
    SettingRule(
        "layer_types",
        f"null, or {SLIDING} or {FULL} for every layer",
        lambda value: value is None or (isinstance(value, list) and all(kind in (SLIDING, FULL) for kind in value)),
        "the libraries have no other attention",
    ),
    off("use_bidirectional_attention", "the libraries attend to earlier tokens only"),
)
"""The rules of Gemma 2 and Gemma 3; Gemma 4 takes most of them."""

MLP_NORMS = {"pre_ffw_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
"""The norms before and after a layer's MLP: Tunix's names, and the names in checkpoints."""


def gemma_leaves(config: Gemma2Config, *more: Leaf, second_norm: str = "post_attn_norm") -> tuple[Leaf, ...]:
    """Return the leaves, with ``more`` in each layer; ``second_norm`` is Tunix's name for the norm after attention.

    Tunix stacks q, k and v if they have equally many heads, otherwise only k and v.
    """
    hidden, all_stacked = config.hidden_size, config.num_attention_heads == config.num_key_value_heads
    names = {"pre_attention_norm": "input_layernorm", second_norm: "post_attention_layernorm", **MLP_NORMS}
    norms = (layer_leaf(f"{own}.scale", f"{name}.weight", (hidden,)) for own, name in names.items())
    widths = {"qkv": config.query_width} if all_stacked else {"q": config.query_width, "kv": config.kv_width}
    stacked = (stacked_leaf(parts, (width, hidden)) for parts, width in widths.items())
    output = layer_leaf(
        "attn.attn_vec_einsum.w", "self_attn.o_proj.weight", (hidden, config.query_width), outputs_last, flatten
    )
    layer = (*norms, *stacked, output, *more, *mlp(config))
    return decoder(config, layer, final_norm=("final_norm.scale", "model.norm.weight"))


def stacked_leaf(parts: str, shape: Shape) -> Leaf:
    """Make the leaf of a module with weights [N, D, H], or [P, N, D, H] if P > 1 projections are stacked."""
    names = tuple(f"model.layers.*.self_attn.{name}_proj.weight" for name in parts)
    numbers = range(len(parts)) if len(parts) > 1 else (None,)
    targets = tuple((name, InputsFirst(part)) for name, part in zip(names, numbers, strict=True))
    return Leaf(f"layers.*.attn.{parts}_einsum.w", names, shape, heads_first, targets, input_axis=-2)


def gemma_fields(config: Gemma2Config, kinds: Any) -> dict[str, Any]:
    """Return the fields of Tunix's config that every Gemma has; ``kinds`` is the AttentionType of Tunix's model."""
    return {
        "num_embed": config.vocab_size,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        "attention_types": tuple(kinds.LOCAL_SLIDING if window else kinds.GLOBAL for window in config.has_window),
        "sliding_window_size": config.sliding_window,
    }


def _own_fields(config: Gemma2Config) -> dict[str, Any]:
    from tunix.models.gemma.model import AttentionType

    return {
        **gemma_fields(config, AttentionType),
        "attn_logits_soft_cap": config.attn_logit_softcapping,
        "final_logit_softcap": config.final_logit_softcapping,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
    }


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    config=Gemma2Config,
    rules=(
        *GEMMA_RULES,
        NO_ROPE_SCALING,
        SettingRule(
            "tie_word_embeddings",
            "true",
            lambda value: value is True,
            "the libraries take the embedding as output head",
        ),
        soft_cap("attn_logit_softcapping"),
        soft_cap("final_logit_softcapping"),
    ),
    defaults={
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    leaves=gemma_leaves,
    divisible=DIVISIBLE,
    package="tunix.models.gemma",
    model="Gemma",
    own_fields=_own_fields,
)
