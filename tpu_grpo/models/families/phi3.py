"""The family of Phi-3 and Phi-4, which compute as Llama but are published with fused projections."""

from dataclasses import replace

from tpu_grpo.models.families.family import COMMON, NO_ROPE_SCALING, NO_WINDOW, off
from tpu_grpo.models.families.llama3 import LLAMA3

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
