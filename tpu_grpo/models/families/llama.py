"""The families that compute like Llama, without norms of queries and keys and without biases: Llama 3, 3.1 and 3.2;
Mistral without a sliding window (7B from v0.2 on, Nemo, Small); Phi-3 and Phi-4, published with fused projections."""

from dataclasses import replace

from tpu_grpo.models.families.decoder import DIVISIBLE, attention, decoder, mlp, norms
from tpu_grpo.models.families.family import (
    COMMON,
    NO_ATTENTION_BIAS,
    NO_ROPE_SCALING,
    NO_WINDOW,
    SCALING,
    DecoderConfig,
    Family,
    off,
)

LLAMA3 = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=DecoderConfig,
    rules=(*COMMON, SCALING, NO_ATTENTION_BIAS, off("mlp_bias")),
    defaults={"tie_word_embeddings": False},
    leaves=lambda config: decoder(config, (*norms(config), *attention(config), *mlp(config))),
    divisible=DIVISIBLE,
    package="tunix.models.llama3",
    model="Llama3",
)

MISTRAL = replace(
    LLAMA3,
    model_type="mistral",
    architecture="MistralForCausalLM",
    rules=(*COMMON, SCALING, replace(NO_WINDOW, required=True)),
    sampler="LlamaForCausalLM",
)

PHI3 = replace(
    LLAMA3,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    rules=(
        *COMMON,
        NO_ROPE_SCALING,
        NO_WINDOW,
        off("resid_pdrop", "Tunix's model has no dropout: set it to 0"),
        off("embd_pdrop", "Tunix's model has no dropout: set it to 0"),
    ),
    sampler="LlamaForCausalLM",
    fused=lambda _: {
        "model.layers.*.self_attn.qkv_proj.weight": tuple(f"model.layers.*.self_attn.{n}_proj.weight" for n in "qkv"),
        "model.layers.*.mlp.gate_up_proj.weight": tuple(f"model.layers.*.mlp.{n}_proj.weight" for n in ("gate", "up")),
    },
    is_fused=True,
)
