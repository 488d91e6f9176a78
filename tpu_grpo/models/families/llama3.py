"""The family of Llama 3, 3.1 and 3.2, without norms of queries and keys, and without biases."""

from tpu_grpo.models.families.decoder import DIVISIBLE, attention, decoder, mlp, norms
from tpu_grpo.models.families.family import COMMON, NO_ATTENTION_BIAS, SCALING, DecoderConfig, Family, off

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
