"""The family of Gemma 4: the text models of the 31B and of the 26B-A4B, and of checkpoints that also see images.

It differs from Gemma 3 in this. Norms multiply by their weight, values have a norm without one, and scores are not
divided. Layers without a window (global layers) have wider heads, of which only the fastest turning part of the
dimensions is rotated. They may have fewer key-value heads, and then have no projection of values: these are the keys
before norm and rotation. Each layer's output is multiplied by a number, and logits are soft-capped.

In a model with experts, every layer adds the output of a few experts per token to that of its MLP. Each has a norm of
its own before and after. The router sees what neither norm has changed: the layer's hidden state, divided by its
root mean square and by the square root of the width, times a scale. A softmax over all experts, divided by its sum over
those chosen, and times a scale for each expert, weights their outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tpu_grpo.models.families.decoder import DIVISIBLE, decoder, layer_leaf, mlp
from tpu_grpo.models.families.family import Family, SettingRule, null, off
from tpu_grpo.models.families.gemma2 import (
    FULL,
    GEMMA_RULES,
    MLP_NORMS,
    SLIDING,
    Gemma2Config,
    gemma_fields,
    soft_cap,
    stacked_leaf,
)
from tpu_grpo.models.families.gemma3 import text_of, text_tensor
from tpu_grpo.models.families.leaves import Layout, Leaf, flatten, inputs_first, outputs_last
from tpu_grpo.models.families.rope import PartialRotation

if TYPE_CHECKING:
    from jaxtyping import Array


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(Gemma2Config):
    """The settings of Gemma 4; its scores have neither a scale nor a soft cap. In a model without experts, the three
    settings of experts have no meaning."""

    rope_parameters: Mapping[str, Mapping[str, Any]]
    global_head_dim: int
    num_global_key_value_heads: int | None
    attention_k_eq_v: bool
    enable_moe_block: bool
    num_experts: int | None
    top_k_experts: int | None
    moe_intermediate_size: int | None

    @property
    def period(self) -> int:
        """See `Gemma2Config`."""
        return 6

    @property
    def has_window(self) -> tuple[bool, ...]:
        """Whether each layer has a window. The last one never has, as in transformers."""
        return (*super().has_window[:-1], False)

    @property
    def scaling(self) -> PartialRotation:
        """The rotation of heads in layers without a window."""
        return PartialRotation(self.rope_parameters[FULL]["partial_rotary_factor"])

    @property
    def widest_head(self) -> int:
        """See `DecoderConfig`."""
        return max(self.head_dim, self.global_head_dim)

    @property
    def query_widths(self) -> int:
        """See `DecoderConfig`."""
        return self.num_attention_heads * sum(self.heads(has_window=window)[1] for window in self.has_window)

    @property
    def global_kv_heads(self) -> int:
        """See `DecoderConfig`."""
        given = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return self.num_key_value_heads if given is None else given

    @property
    def experts(self) -> tuple[int, int]:
        """See `DecoderConfig`."""
        return (self.num_experts or 1, self.top_k_experts or 1) if self.enable_moe_block else (1, 0)

    def heads(self, *, has_window: bool) -> tuple[int, int]:
        """Return the number and the width of key-value heads in a layer with or without a window."""
        local, everywhere = (self.num_key_value_heads, self.head_dim), (self.global_kv_heads, self.global_head_dim)
        return local if has_window else everywhere

    def contradiction(self) -> str | None:
        """Describe contradicting settings, also of the heads and experts that Gemma 3 lacks."""
        if self.num_attention_heads % self.global_kv_heads or self.global_head_dim % 2:
            return (
                f"num_global_key_value_heads must divide num_attention_heads={self.num_attention_heads}, and "
                f"global_head_dim be even, got {self.global_kv_heads} and {self.global_head_dim}"
            )
        sizes = {name: getattr(self, name) for name in ("top_k_experts", "num_experts", "moe_intermediate_size")}
        if self.enable_moe_block and (None in sizes.values() or self.experts[1] > self.experts[0]):
            return f"with enable_moe_block, sizes must be given, and top_k_experts be <= num_experts, got {sizes}"
        return super().contradiction()


# --- checkpoints ------------------------------------------------------------------------------------------------------

_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a text model, from a config.json of ``model_type`` gemma4 or gemma4_text."""
    return text_of(settings, GEMMA4, "gemma4", _with_published_names)


def _with_published_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename what transformers 5.24 writes as ``per_layer_config``, unless it is not the same for all global layers.

    "per_layer_config": {"5": {"head_dim": 512, "num_key_value_heads": 4}, "11": ...}
    "global_head_dim": 512, "num_global_key_value_heads": 4
    """
    found, kinds = dict(settings), settings.get("layer_types")
    if found.get("rope_parameters") is None:
        found["rope_parameters"] = _ROPE
    each = settings.get("per_layer_config")
    if not (isinstance(each, Mapping) and isinstance(kinds, list) and each):
        return found
    first = next(iter(each.values()))
    known = isinstance(first, Mapping) and {"head_dim"} <= first.keys() <= {"head_dim", "num_key_value_heads"}
    everywhere = {str(i): first for i, kind in enumerate(kinds) if kind == FULL}
    if known and {str(i): own for i, own in each.items()} == everywhere:
        heads = first.get("num_key_value_heads")
        if heads is None or settings.get("attention_k_eq_v") or heads == settings.get("num_key_value_heads"):
            del found["per_layer_config"]
            found |= {"global_head_dim": first["head_dim"], "num_global_key_value_heads": heads}
    return found


def _is_rope(value: Any) -> bool:
    """Whether ``rope_parameters`` have this form and no more."""
    match value:
        case {
            "sliding_attention": {"rope_type": "default", "rope_theta": local, **local_rest},
            "full_attention": {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": part, **rest},
            **others,
        } if not (local_rest or rest or others):
            return all(type(n) in (int, float) and 0 < n < 1e38 for n in (local, base, part)) and part <= 1
    return False


_LARGE = "take Gemma 4 31B or 26B-A4B, or Gemma 3"
_RULES = (
    *(rule for rule in GEMMA_RULES if rule.setting not in ("rope_parameters", "use_bidirectional_attention")),
    SettingRule(
        "rope_parameters",
        f"for {SLIDING} a rope_theta and the rope_type default, and for {FULL} a rope_theta, the rope_type "
        "proportional and a partial_rotary_factor in (0, 1]",
        _is_rope,
        "Gemma 4 has no other positions: copy the model's own config.json again",
    ),
    SettingRule(
        "use_bidirectional_attention",
        "null, or vision",
        lambda value: value in (None, "vision"),
        "text attends to earlier tokens only",
    ),
    SettingRule(
        "hidden_size_per_layer_input",
        "0",
        lambda value: value == 0,
        f"sglang-jax has no embeddings per layer, as E2B and E4B have: {_LARGE}",
        required=True,
    ),
    off("num_kv_shared_layers", f"sglang-jax has no layers that share keys and values, as E2B and E4B have: {_LARGE}"),
    null("per_layer_config", "layers without a window must have heads of one number and width, and the others none"),
    SettingRule("tie_word_embeddings", "true", lambda value: value is True, "the libraries' head is the embedding"),
    null("rope_scaling", "Gemma 4 does not scale positions"),
    SettingRule(
        "query_pre_attn_scalar", "null or 1", lambda value: value in (None, 1), "Gemma 4 does not scale scores"
    ),
    null("attn_logit_softcapping", "Gemma 4 does not cap scores"),
    soft_cap("final_logit_softcapping"),
)


# --- the model --------------------------------------------------------------------------------------------------------


def _gate(part: int) -> Any:
    """Take [E, 2, F, D][:, part] as [E, D, F]."""

    def transform(leaf: Array, shape: Any) -> Array:
        del shape
        return leaf[:, part].transpose(0, 2, 1)

    return transform


_GATE, _UP = _gate(0), _gate(1)
_FUSED = Layout(lambda leaf: leaf.reshape(len(leaf), -1, leaf.shape[-1]), lambda tensor, shape: tensor.reshape(shape))
"""A checkpoint stores [E, 2, F, D] as [E, 2 F, D]."""
_SWAPPED = Layout(lambda leaf: leaf.transpose(0, 2, 1), lambda tensor, shape: tensor.transpose(0, 2, 1))
"""A checkpoint stores [E, F, D] as [E, D, F]."""


def _leaves(config: Gemma4Config) -> tuple[Leaf, ...]:
    norms = {"pre_attention_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", **MLP_NORMS}
    if config.enable_moe_block:
        norms |= {f"{own}_ffw_norm": f"{name}_feedforward_layernorm_{i}" for own, name, i in _EXPERT_NORMS}
    layer = (
        *(layer_leaf(f"{own}.scale", f"{name}.weight", (config.hidden_size,)) for own, name in norms.items()),
        layer_leaf("skip_scale", "layer_scalar", (1,)),
        *_attention(config, has_window=True),
        *_attention(config, has_window=False),
        *mlp(config),
        *(_experts(config) if config.enable_moe_block else ()),
    )
    return decoder(config, layer, final_norm=("final_norm.scale", "model.norm.weight"))


_EXPERT_NORMS = (("dense_post", "post", 1), ("moe_pre", "pre", 2), ("moe_post", "post", 2))


def _attention(config: Gemma4Config, *, has_window: bool) -> tuple[Leaf, ...]:
    """Return the leaves of attention that the layers with a window have, or those without."""
    heads, width = config.heads(has_window=has_window)
    hidden, queries = config.hidden_size, config.num_attention_heads * width
    keys = "k" if config.attention_k_eq_v and not has_window else "kv"
    found = (
        stacked_leaf("q", (queries, hidden)),
        stacked_leaf(keys, (heads * width, hidden)),
        layer_leaf("attn.attn_vec_einsum.w", "self_attn.o_proj.weight", (hidden, queries), outputs_last, flatten),
        layer_leaf("attn._query_norm.scale", "self_attn.q_norm.weight", (width,)),
        layer_leaf("attn._key_norm.scale", "self_attn.k_norm.weight", (width,)),
    )
    own = frozenset(i for i, window in enumerate(config.has_window) if window == has_window)
    return tuple(replace(leaf, layers=own) for leaf in found) if own else ()


def _experts(config: Gemma4Config) -> tuple[Leaf, ...]:
    (experts, _), hidden, width = config.experts, config.hidden_size, config.moe_intermediate_size or 1
    name = "model.layers.*.experts"
    halves = ((f"{name}.wi_0", _GATE), (f"{name}.wi_1", _UP))
    return (
        layer_leaf("moe.router_scale", "router.scale", (hidden,)),
        layer_leaf(
            "moe.router_logits", "router.proj.weight", (experts, hidden), inputs_first, target="router.proj.kernel"
        ),
        layer_leaf("moe.per_expert_scale", "router.per_expert_scale", (experts,)),
        Leaf("layers.*.moe.gating_einsum", (f"{name}.gate_up_proj",), (experts, 2 * width, hidden), _FUSED, halves),
        layer_leaf("moe.linear", "experts.down_proj", (experts, hidden, width), _SWAPPED, target="experts.wo"),
    )


def _own_fields(config: Gemma4Config) -> dict[str, Any]:
    from tunix.models.gemma4.model import AttentionType, ShardingConfig

    (experts, of_token), axes = config.experts, ShardingConfig.get_default_sharding()
    by_output = (axes.exp_weight_efd[0], None, axes.exp_weight_efd[1], None)  # of [E, 2, F, D], as [E, F, D] is
    kinds = gemma_fields(config, AttentionType)
    return {
        **kinds,
        "attention_pattern": kinds["attention_types"],
        "local_base_frequency": config.rope_parameters[SLIDING]["rope_theta"],
        "global_base_frequency": config.rope_parameters[FULL]["rope_theta"],
        "global_rope_proportion": config.scaling.share,
        "global_key_size": config.global_head_dim,
        "num_global_kv_heads": config.global_kv_heads,
        "k_eq_v_global": config.attention_k_eq_v,
        "final_logit_softcap": None,  # the repaired model applies this one
        "soft_cap": config.final_logit_softcapping,
        "use_sliding_window_kv_cache": False,
        "shd_config": replace(axes, exp_weight_edf=by_output),
        "enable_moe": config.enable_moe_block,
        "num_experts": experts,
        "num_experts_per_tok": of_token,
        "expert_dim": config.moe_intermediate_size,
    }


def _sampler_fields(config: Gemma4Config) -> dict[str, Any]:
    """Name the heads of layers with a window ``swa_``, and those of the others as if they were all."""
    return {
        "head_dim": config.global_head_dim,
        "num_key_value_heads": config.global_kv_heads,
        "swa_head_dim": config.head_dim,
        "swa_num_key_value_heads": config.num_key_value_heads,
        "layer_types": [SLIDING if window else FULL for window in config.has_window],
    }


GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    config=Gemma4Config,
    rules=_RULES,
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 1,
        "sliding_window": 512,
        "layer_types": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    leaves=_leaves,
    divisible={
        "fsdp": (*DIVISIBLE["fsdp"], "num_experts"),
        "tp": (*DIVISIBLE["tp"], "global_kv_heads", "head_dim", "moe_intermediate_size"),
        "tensor": (*DIVISIBLE["tensor"], "num_experts"),
    },
    package="tunix.models.gemma4",
    model="Gemma4",
    own_fields=_own_fields,
    sampler_fields=_sampler_fields,
    renamed=text_tensor,
)
