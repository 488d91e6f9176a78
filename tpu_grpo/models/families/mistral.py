"""The family of Mistral models without a sliding window, which compute as Llama: 7B from v0.2 on, Nemo, Small."""

from dataclasses import replace

from tpu_grpo.models.families.family import COMMON, NO_WINDOW, SCALING
from tpu_grpo.models.families.llama3 import LLAMA3

MISTRAL = replace(
    LLAMA3,
    model_type="mistral",
    architecture="MistralForCausalLM",
    rules=(*COMMON, SCALING, replace(NO_WINDOW, required=True)),
    sampler="LlamaForCausalLM",
)
