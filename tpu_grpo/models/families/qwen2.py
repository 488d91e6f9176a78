"""Defines the family of Qwen2 and Qwen2.5, whose queries, keys and values have biases."""

from __future__ import annotations

from tpu_grpo.models.families import decoder
from tpu_grpo.models.families.family import DecoderConfig, Family, Shape
from tpu_grpo.models.families.layouts import WeightRule, repeat_kv
from tpu_grpo.models.families.publishing import TensorRule, unchanged
from tpu_grpo.models.families.settings import COMMON, NO_ROPE_SCALING


def _tensors(config: DecoderConfig) -> dict[str, Shape]:
    biases: dict[str, Shape] = {
        "self_attn.q_proj.bias": (config.query_width,),
        "self_attn.k_proj.bias": (config.kv_width,),
        "self_attn.v_proj.bias": (config.kv_width,),
    }
    layer = decoder.norm_shapes(config) | decoder.attention_shapes(config) | biases | decoder.mlp_shapes(config)
    return decoder.decoder_shapes(config, layer)


def _weights(config: DecoderConfig) -> tuple[WeightRule, ...]:
    repeat = repeat_kv(config.head_dim)
    biases = (
        decoder.layer_rule("attn.q_bias", "self_attn.q_proj.bias"),
        decoder.layer_rule("attn.k_bias", "self_attn.k_proj.bias", repeat),
        decoder.layer_rule("attn.v_bias", "self_attn.v_proj.bias", repeat),
    )
    return (*decoder.EMBEDDINGS_AND_NORMS, *decoder.ATTENTION, *biases, *decoder.MLP)


def _published(config: DecoderConfig) -> tuple[TensorRule, ...]:
    biases = (
        TensorRule(f"layers.*.attn.{name}_bias", (f"model.layers.*.self_attn.{name}_proj.bias",), unchanged)
        for name in "qkv"
    )
    layer = (*decoder.PUBLISHED_NORMS, *decoder.PUBLISHED_ATTENTION, *biases, *decoder.PUBLISHED_MLP)
    return decoder.published_decoder(config, layer)


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=DecoderConfig,
    rules=(*COMMON, NO_ROPE_SCALING),
    defaults={"tie_word_embeddings": False},
    tensor_shapes=_tensors,
    ignored_tensors=decoder.tied_head,
    divisible=decoder.DIVISIBLE,
    model_config=decoder.tunix_qwen_config("tunix.models.qwen2.model"),
    model_class=decoder.tunix_class("tunix.models.qwen2.model", "Qwen2"),
    load=decoder.tunix_loader("tunix.models.qwen2.params"),
    flash_attention=True,
    weight_rules=_weights,
    tensor_rules=_published,
)
