"""The family of Mistral models without a sliding window, which compute as Llama: 7B from v0.2 on, Nemo, Small."""

from dataclasses import replace

from tpu_grpo.models.families.family import COMMON, SCALING, null
from tpu_grpo.models.families.llama3 import LLAMA3

_NO_WINDOW = replace(
    null("sliding_window", "the libraries attend to everything: set it to null if no sequence exceeds the window"),
    required=True,
)

MISTRAL = replace(
    LLAMA3,
    model_type="mistral",
    architecture="MistralForCausalLM",
    rules=(*COMMON, SCALING, _NO_WINDOW),
    sampler="LlamaForCausalLM",
)
