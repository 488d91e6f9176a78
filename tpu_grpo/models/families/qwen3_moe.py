"""Defines the family of Qwen3 models with experts in every layer.

They are as dense Qwen3 models except for the MLPs: each layer has many, and a router picks a few for each token. The
router's weights are a softmax over all experts, of which the largest ``num_experts_per_tok`` are kept and divided by
their sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_grpo.models.families import decoder
from tpu_grpo.models.families.family import DecoderConfig, Family, SettingRule, Shape
from tpu_grpo.models.families.layouts import flatten
from tpu_grpo.models.families.publishing import TensorRule, inputs_first
from tpu_grpo.models.families.qwen3 import qk_norm_shapes
from tpu_grpo.models.families.settings import COMMON, NO_ATTENTION_BIAS, NO_ROPE_SCALING, off


@dataclass(frozen=True)
class MoeConfig(DecoderConfig):
    """The settings of a decoder with experts; ``intermediate_size`` is that of dense layers, and it has none."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int

    def contradiction(self) -> str | None:
        """Look also for more experts per token than there are."""
        if self.num_experts_per_tok > self.num_experts:
            return f"num_experts_per_tok must be <= num_experts={self.num_experts}, got {self.num_experts_per_tok}"
        return super().contradiction()


_EXPERTS_EVERYWHERE = "Tunix's model has experts in every layer or in none"
_RULES = (
    SettingRule(
        "norm_topk_prob",
        "true",
        lambda value: value is True,
        "the libraries always divide the weights of a token's experts by their sum",
        required=True,
    ),
    SettingRule("decoder_sparse_step", "1", lambda value: value == 1, _EXPERTS_EVERYWHERE),
    off("mlp_only_layers", _EXPERTS_EVERYWHERE),
)


def _tensors(config: MoeConfig) -> dict[str, Shape]:
    layer = decoder.norm_shapes(config) | decoder.attention_shapes(config) | qk_norm_shapes(config)
    layer["mlp.gate.weight"] = (config.num_experts, config.hidden_size)
    for i in range(config.num_experts):
        layer |= decoder.gated_shapes(f"mlp.experts.{i}", config.hidden_size, config.moe_intermediate_size)
    return decoder.decoder_shapes(config, layer)


def _tunix_fields(config: MoeConfig) -> dict[str, Any]:
    return {
        "hidden_dim": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
    }


_WEIGHTS = (
    *decoder.EMBEDDINGS_AND_NORMS,
    *decoder.QUERIES_KEYS_VALUES,
    decoder.layer_rule("attn.o_proj.w", "self_attn.c_proj.weight", flatten),
    *decoder.QK_NORMS,
    decoder.layer_rule("mlp.router.kernel", "moe_gate.kernel"),
    decoder.layer_rule("mlp.gate_proj", "mlp.wi_0"),
    decoder.layer_rule("mlp.up_proj", "mlp.wi_1"),
    decoder.layer_rule("mlp.down_proj", "mlp.wo"),
)


def _published(config: MoeConfig) -> tuple[TensorRule, ...]:
    def experts(projection: str) -> TensorRule:
        names = (f"model.layers.*.mlp.experts.{i}.{projection}.weight" for i in range(config.num_experts))
        return TensorRule(f"layers.*.mlp.{projection}", tuple(names), inputs_first)

    mlp = (decoder.published("mlp.router.kernel", "mlp.gate", inputs_first),)
    mlp += tuple(experts(f"{name}_proj") for name in ("gate", "up", "down"))
    attention = (*decoder.PUBLISHED_ATTENTION, *decoder.PUBLISHED_QK_NORMS)
    return decoder.published_decoder(config, (*decoder.PUBLISHED_NORMS, *attention, *mlp))


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config=MoeConfig,
    rules=(*COMMON, NO_ROPE_SCALING, NO_ATTENTION_BIAS, *_RULES),
    defaults={"tie_word_embeddings": False},
    tensor_shapes=_tensors,
    ignored_tensors=decoder.tied_head,
    divisible={
        "fsdp": ("hidden_size", "num_experts"),
        "tp": (
            "num_key_value_heads",
            "num_attention_heads",
            "head_dim",
            "hidden_size",
            "moe_intermediate_size",
            "vocab_size",
        ),
        "tensor": ("num_attention_heads", "num_experts"),
    },
    model_config=decoder.tunix_qwen_config("tunix.models.qwen3.model", _tunix_fields),
    model_class=decoder.tunix_class("tunix.models.qwen3.model", "Qwen3"),
    load=decoder.tunix_loader("tunix.models.qwen3.params"),
    flash_attention=True,
    weight_rules=lambda _: _WEIGHTS,
    tensor_rules=_published,
)
