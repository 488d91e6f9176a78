"""Lists the supported model families and all that the package needs to know of each.

Every family has a file and a line in the table FAMILIES. The other files are:

family.py           the record of a family, and the settings of a config.json
settings.py         rules for config.json that families share
layouts.py          how a leaf of the trainer becomes a leaf of the sampler
decoder.py          what the families have in common
publishing.py       how a leaf of the trainer becomes tensors of a checkpoint
projections.py      which projections a module of Tunix's models holds
rope.py             frequencies of rotary positions
flash_attention.py  whether the trainer uses Tunix's flash attention, and its blocks
tunix_version.py    the version of Tunix that was reviewed

Nothing here imports jax until a model is configured or loaded.
"""

from collections.abc import Mapping

from tpu_grpo.models.families.family import DecoderConfig, Family, Remat, SettingRule, Shape
from tpu_grpo.models.families.gemma2 import GEMMA2
from tpu_grpo.models.families.layouts import Transform, WeightRule, same
from tpu_grpo.models.families.llama3 import LLAMA3
from tpu_grpo.models.families.projections import projections
from tpu_grpo.models.families.publishing import TensorRule, published_leaves
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

__all__ = [
    "FAMILIES",
    "REFUSED",
    "DecoderConfig",
    "Family",
    "Remat",
    "SettingRule",
    "Shape",
    "TensorRule",
    "Transform",
    "WeightRule",
    "projections",
    "published_leaves",
    "same",
]
