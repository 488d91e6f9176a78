"""Every setting of a run once, typed, documented and validated; unknown keys are refused.

    config = load_config("configs/demo_cpu.yaml", ["run.seed=1", "optimizer.learning_rate=3e-4"])

    sections.py   the settings themselves: read this
    places.py     those of devices and processes; rewards.py: those of a reward
    data.py       those of data and of evaluation
    training.py   those of what is trained; layers.py: ranges of layers
    rules.py      what must hold between settings of different sections
    loading.py    YAML and overrides -> RunConfig, with errors people can act on
    listing.py    every setting with its type and default, for --help
    dialect.py    the YAML that is read and written

Imports nothing heavy, so that ``--help`` and a typing error cost nothing.
"""

from tpu_grpo.config.data import (
    BUILTIN,
    BUILTIN_TASK,
    GYM,
    HUB,
    DataSection,
    EvaluationSection,
    ReadingSection,
    SourceSpec,
)
from tpu_grpo.config.layers import parse_layers
from tpu_grpo.config.listing import settings
from tpu_grpo.config.loading import load_config, parse_config
from tpu_grpo.config.places import HostsSection, MeshesSection
from tpu_grpo.config.rewards import RewardSpec, check_rewards
from tpu_grpo.config.rules import CACHE_MARGIN_TOKENS
from tpu_grpo.config.section import Section
from tpu_grpo.config.sections import (
    AlgorithmSection,
    CheckpointSection,
    LoggingSection,
    LossAggregation,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    RunConfig,
    RunSection,
)
from tpu_grpo.config.training import LoraSection

__all__ = [
    "BUILTIN",
    "BUILTIN_TASK",
    "CACHE_MARGIN_TOKENS",
    "GYM",
    "HUB",
    "AlgorithmSection",
    "CheckpointSection",
    "DataSection",
    "EvaluationSection",
    "HostsSection",
    "LoggingSection",
    "LoraSection",
    "LossAggregation",
    "MeshesSection",
    "ModelSection",
    "OptimizerSection",
    "ReadingSection",
    "RewardSpec",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "Section",
    "SourceSpec",
    "check_rewards",
    "load_config",
    "parse_config",
    "parse_layers",
    "settings",
]
