"""Defines the family of dense Qwen3 models, which norm queries and keys by head and have no biases."""

from __future__ import annotations

from tpu_grpo.models.families import decoder
from tpu_grpo.models.families.family import DecoderConfig, Family, Shape
from tpu_grpo.models.families.settings import COMMON, NO_ATTENTION_BIAS, NO_ROPE_SCALING


def qk_norm_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shapes of the norms of a layer's queries and keys."""
    return {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}


def _tensors(config: DecoderConfig) -> dict[str, Shape]:
    layer = decoder.norm_shapes(config) | decoder.attention_shapes(config) | qk_norm_shapes(config)
    return decoder.decoder_shapes(config, layer | decoder.mlp_shapes(config))


_PUBLISHED = (
    *decoder.PUBLISHED_NORMS,
    *decoder.PUBLISHED_ATTENTION,
    *decoder.PUBLISHED_QK_NORMS,
    *decoder.PUBLISHED_MLP,
)
_WEIGHTS = (*decoder.EMBEDDINGS_AND_NORMS, *decoder.ATTENTION, *decoder.QK_NORMS, *decoder.MLP)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=DecoderConfig,
    rules=(*COMMON, NO_ROPE_SCALING, NO_ATTENTION_BIAS),
    defaults={"head_dim": 128, "tie_word_embeddings": False},
    tensor_shapes=_tensors,
    ignored_tensors=decoder.tied_head,
    divisible={
        **decoder.DIVISIBLE,
        "tp": (*decoder.DIVISIBLE["tp"], "head_dim"),  # the norms of queries and keys are split over tp as well
    },
    model_config=decoder.tunix_qwen_config("tunix.models.qwen3.model"),
    model_class=decoder.tunix_class("tunix.models.qwen3.model", "Qwen3"),
    load=decoder.tunix_loader("tunix.models.qwen3.params"),
    flash_attention=True,
    weight_rules=lambda _: _WEIGHTS,
    tensor_rules=lambda config: decoder.published_decoder(config, _PUBLISHED),
)
