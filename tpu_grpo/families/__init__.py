"""Lists the supported model families and all that the package needs to know of each.

Every family has a file and a line in the table FAMILIES. The other files are:

family.py           the record of a family, and the settings of a config.json
settings.py         rules for config.json that families share
layouts.py          how a leaf of the trainer becomes a leaf of the sampler
decoder.py          what the families have in common
rope.py             frequencies of rotary positions
flash_attention.py  whether the trainer uses Tunix's flash attention, and its blocks
tunix_version.py    the version of Tunix that was reviewed

Nothing here imports jax until a model is configured or loaded.
"""

from collections.abc import Mapping

from tpu_grpo.families.family import DecoderConfig, Family, Remat, SettingRule, Shape
from tpu_grpo.families.layouts import Transform, WeightRule, same
from tpu_grpo.families.llama3 import LLAMA3
from tpu_grpo.families.qwen2 import QWEN2
from tpu_grpo.families.qwen3 import QWEN3
from tpu_grpo.families.qwen3_moe import QWEN3_MOE

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (QWEN2, QWEN3, QWEN3_MOE, LLAMA3)}
"""Every supported family, by the ``model_type`` of its config.json."""

__all__ = [
    "FAMILIES",
    "DecoderConfig",
    "Family",
    "Remat",
    "SettingRule",
    "Shape",
    "Transform",
    "WeightRule",
    "same",
]
