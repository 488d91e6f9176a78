"""The family of dense Qwen3 models, with norms of the queries and keys of each head, and without biases."""

from tpu_grpo.models.families.decoder import DIVISIBLE, attention, decoder, mlp, norms, qk_norms
from tpu_grpo.models.families.family import COMMON, NO_ATTENTION_BIAS, SCALING, DecoderConfig, Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=DecoderConfig,
    rules=(*COMMON, SCALING, NO_ATTENTION_BIAS),
    defaults={"head_dim": 128, "tie_word_embeddings": False},
    leaves=lambda config: decoder(config, (*norms(config), *attention(config), *qk_norms(config), *mlp(config))),
    divisible={
        **DIVISIBLE,
        "tp": (*DIVISIBLE["tp"], "head_dim"),  # the norms of queries and keys are split over tp as well
    },
    package="tunix.models.qwen3",
    model="Qwen3",
)
