"""The dense families of Qwen. In Qwen2 and Qwen2.5, queries, keys and values have biases. Qwen3 has norms of the
queries and keys of each head, and no biases."""

from tpu_grpo.models.families.decoder import DIVISIBLE, attention, decoder, layer_leaf, mlp, norms, qk_norms
from tpu_grpo.models.families.family import COMMON, NO_ATTENTION_BIAS, SCALING, DecoderConfig, Family
from tpu_grpo.models.families.leaves import Leaf, repeat_kv, same, unchanged


def _leaves(config: DecoderConfig) -> tuple[Leaf, ...]:
    repeat = repeat_kv(config.head_dim)
    kinds = {"q": (config.query_width, same), "k": (config.kv_width, repeat), "v": (config.kv_width, repeat)}
    biases = (
        layer_leaf(f"attn.{name}_bias", f"self_attn.{name}_proj.bias", (width,), unchanged, transform)
        for name, (width, transform) in kinds.items()
    )
    return decoder(config, (*norms(config), *attention(config), *biases, *mlp(config)))


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=DecoderConfig,
    rules=(*COMMON, SCALING),
    defaults={"tie_word_embeddings": False},
    leaves=_leaves,
    divisible=DIVISIBLE,
    package="tunix.models.qwen2",
    model="Qwen2",
)

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
