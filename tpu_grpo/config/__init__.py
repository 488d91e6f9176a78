"""Defines, types, documents and validates every setting of a run; unknown keys are refused.

    config = load_config("configs/demo_cpu.yaml", ["run.seed=1", "optimizer.learning_rate=3e-4"])

No slow library such as jax is imported, so that ``--help`` and error messages appear quickly.
"""

from tpu_grpo.config.config_files import SHIPPED_CONFIGS, changed_config, load_config, parse_config
from tpu_grpo.config.data_sections import (
    BUILTIN,
    GIVEN,
    GYM,
    HUB,
    NO_DATA,
    DataSection,
    EvaluationSection,
    ReadingSection,
    RewardSpec,
    check_rewards,
)
from tpu_grpo.config.learning_sections import (
    AlgorithmSection,
    LossAggregation,
    OptimizerSection,
    TeacherSpec,
    UpdateSection,
)
from tpu_grpo.config.run_config import CACHE_MARGIN_TOKENS, MICRO_BATCHES, PROMPT_MARGIN_TOKENS, RunConfig, settings
from tpu_grpo.config.section import Section, parse_layers
from tpu_grpo.config.sections import (
    EnvironmentSection,
    ExportSection,
    HostsSection,
    LoggingSection,
    LoraSection,
    MeshesSection,
    ModelSection,
    RolloutSection,
    RunSection,
)
from tpu_grpo.config.setting_names import ARRAYS, EVERYTHING, Effect, effect_of, listed_name

__all__ = [
    "ARRAYS",
    "BUILTIN",
    "CACHE_MARGIN_TOKENS",
    "EVERYTHING",
    "GIVEN",
    "GYM",
    "HUB",
    "MICRO_BATCHES",
    "NO_DATA",
    "PROMPT_MARGIN_TOKENS",
    "SHIPPED_CONFIGS",
    "AlgorithmSection",
    "DataSection",
    "Effect",
    "EnvironmentSection",
    "EvaluationSection",
    "ExportSection",
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
    "TeacherSpec",
    "UpdateSection",
    "changed_config",
    "check_rewards",
    "effect_of",
    "listed_name",
    "load_config",
    "parse_config",
    "parse_layers",
    "settings",
]
