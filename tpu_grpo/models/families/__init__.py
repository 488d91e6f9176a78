"""The supported model families, each with a file and a line in FAMILIES.

Nothing here imports jax until a model is configured or loaded.
"""

from collections.abc import Mapping

from tpu_grpo.models.families.family import Family
from tpu_grpo.models.families.gemma2 import GEMMA2
from tpu_grpo.models.families.llama3 import LLAMA3
from tpu_grpo.models.families.qwen2 import QWEN2
from tpu_grpo.models.families.qwen3 import QWEN3
from tpu_grpo.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (QWEN2, QWEN3, QWEN3_MOE, LLAMA3, GEMMA2)}
"""Every supported family, by the ``model_type`` of its config.json."""

_GEMMA4 = (
    "the sampler's cache has layers of one shape, and those of Gemma 4 differ: its global layers have fewer and wider "
    "heads than its sliding ones"
)
REFUSED: Mapping[str, str] = {
    "gemma": "sglang-jax has no model of Gemma 1",
    "gemma3": "sglang-jax has no model of Gemma 3",
    "gemma3_text": "sglang-jax has no model of Gemma 3",
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
}
"""Why the families that are likely to be asked for are not supported, by ``model_type``."""
