"""The supported model families, which FAMILIES lists; related families share a file.

Nothing here imports jax until a model is configured or loaded.
"""

from collections.abc import Mapping

from tpu_grpo.config.plugins import Shipped
from tpu_grpo.models.families.family import Family

FAMILIES: Mapping[str, Family] = Shipped(
    __name__,
    {
        "qwen2": "qwen:QWEN2",
        "qwen3": "qwen:QWEN3",
        "qwen3_moe": "qwen3_moe:QWEN3_MOE",
        "llama": "llama:LLAMA3",
        "mistral": "llama:MISTRAL",
        "phi3": "llama:PHI3",
        "gemma2": "gemma2:GEMMA2",
        "gemma3_text": "gemma3:GEMMA3",
        "gemma4_text": "gemma4:GEMMA4",
    },
)
"""Every supported family, by the ``model_type`` of its config.json."""

_REASONS: tuple[tuple[str, str, str], ...] = (
    ("gemma", "sglang-jax has no model of Gemma 1", "Gemma 3"),
    ("gemma3", "its config.json has no text_config, which holds its text model's settings", "Gemma 3 as published"),
    (
        "gemma3n gemma3n_text",
        "neither library has its embeddings per layer, nor its layers that share keys and values",
        "Gemma 3",
    ),
    ("siglip_vision_model", "it is a vision tower without a text model", "Gemma 3"),
    ("gemma4_unified gemma4_unified_text", "neither library has a model of it", "Gemma 4 31B or 26B-A4B"),
    ("gemma4", "its config.json has no text_config, which holds its text model's settings", "Gemma 4 as published"),
    ("qwen2_moe", "Tunix has no model of Qwen2 with experts", "Qwen3-30B-A3B"),
    ("qwen2_vl qwen2_5_vl qwen3_vl", "its images have no place in a prompt here", "Qwen3"),
    (
        "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
        "Tunix has no linear attention, which most of its layers are",
        "Qwen3",
    ),
    ("mistral3 ministral3", "neither library has its scaled queries, nor images", "Mistral Nemo or Small 2501"),
    ("ministral", "neither library has a Llama with windows", "Mistral 7B v0.3 or Nemo"),
    ("mixtral", "neither library has its experts", "Qwen3-30B-A3B, or Mistral without experts"),
    (
        "olmo2 olmo3",
        "neither library has norms after the blocks alone, nor norms over all heads of queries and keys",
        "Llama 3.1 or Qwen3",
    ),
    ("smollm3", "neither library has layers without positions, as every fourth is", "Qwen3-1.7B, or SmolLM2"),
    ("gpt_oss", "neither library has attention sinks", "Qwen3-30B-A3B"),
    (
        "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2",
        "Tunix has no latent attention",
        "Qwen3-30B-A3B, or DeepSeek-R1-Distill of Llama or Qwen",
    ),
    ("llama4 llama4_text", "Tunix has neither its chunks of attention nor its experts", "Llama 3.1"),
    ("phi phimoe", "neither library has its layer norms with biases", "Phi-4"),
    ("cohere cohere2", "neither library has attention and MLP side by side", "Qwen3"),
    ("glm glm4", "neither library rotates half of a head in pairs", "Qwen3"),
    ("glm4_moe", "Tunix has no model of it", "Qwen3-30B-A3B"),
    ("granite granitemoe", "neither library multiplies embeddings, blocks and logits as it does", "Llama 3.1 or Qwen3"),
    ("nemotron", "neither library has squared ReLU", "Llama 3.1"),
)
REFUSED: Mapping[str, tuple[str, str]] = {kind: (why, near) for kinds, why, near in _REASONS for kind in kinds.split()}
"""Unsupported families that users are likely to try, by ``model_type``: (the reason, similar supported models)."""
