"""The family of Qwen3 models with experts in every layer.

They differ from dense Qwen3 models only in the MLPs: each layer has many MLPs (experts), and a router picks a few per
token. The router computes a softmax over all experts. The largest ``num_experts_per_tok`` probabilities, divided by
their sum, are the weights of the experts picked.
"""

from __future__ import annotations

from tpu_grpo.models.families.decoder import attention, decoder, gated_shapes, layer_leaf, norms, qk_norms
from tpu_grpo.models.families.family import COMMON, NO_ATTENTION_BIAS, SCALING, Family, MoeConfig, SettingRule, off
from tpu_grpo.models.families.leaves import Leaf, inputs_first, same

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
_SAMPLERS_NAMES = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}


def _leaves(config: MoeConfig) -> tuple[Leaf, ...]:
    router = layer_leaf(
        "mlp.router.kernel",
        "mlp.gate.weight",
        (config.num_experts, config.hidden_size),
        inputs_first,
        target="moe_gate.kernel",
    )
    experts = (
        Leaf(
            f"layers.*.mlp.{name}",
            tuple(f"model.layers.*.mlp.experts.{i}.{name}.weight" for i in range(config.num_experts)),
            shape,
            inputs_first,
            ((f"model.layers.*.mlp.{_SAMPLERS_NAMES[name]}", same),),
        )
        for name, shape in gated_shapes(config.hidden_size, config.moe_intermediate_size).items()
    )
    projections = attention(config, output="c_proj")
    return decoder(config, (*norms(config), *projections, *qk_norms(config), router, *experts))


def _fused(config: MoeConfig) -> dict[str, tuple[str, ...]]:
    """Name the fused tensors of transformers 5 and their parts. transformers saves the parts; other programs may save
    the fused tensors."""
    experts = "model.layers.*.mlp.experts"
    numbers = range(config.num_experts)
    return {
        f"{experts}.gate_up_proj": tuple(f"{experts}.{i}.{n}_proj.weight" for i in numbers for n in ("gate", "up")),
        f"{experts}.down_proj": tuple(f"{experts}.{i}.down_proj.weight" for i in numbers),
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config=MoeConfig,
    rules=(*COMMON, SCALING, NO_ATTENTION_BIAS, *_RULES),
    defaults={"tie_word_embeddings": False},
    leaves=_leaves,
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
    package="tunix.models.qwen3",
    model="Qwen3",
    fused=_fused,
    own_fields=lambda config: {
        "hidden_dim": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
    },
)
