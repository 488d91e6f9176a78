"""Every setting of a run stands here once, typed, documented and validated; unknown keys are refused.

    config = load_config("configs/demo_cpu.yaml", ["run.seed=1", "optimizer.learning_rate=3e-4"])

    sections.py     the settings of run, model, rollout, meshes, hosts, checkpoint, export and logging
    learning.py     the settings of algorithm and optimizer
    choosing.py     the settings of which prompts are sampled and learnt from
    data.py         the settings of data, rewards and evaluation
    environment.py  the settings of environments: tools and turns
    run_config.py   all sections together, and the sizes derived from them
    effects.py      what a setting that is changed while a run is continued does to its results
    rules.py        what must hold between settings of different sections
    loading.py      reads YAML and overrides into a RunConfig, with errors people can act on
    dialect.py      says which YAML is read and written
    listing.py      lists every setting with its type and default, for --help
    section.py      the base of every section, and types of values

Nothing heavy is imported, so that ``--help`` and a typing error cost nothing.
"""

from tpu_grpo.config.data import (
    BUILTIN,
    BUILTIN_TASK,
    GIVEN,
    GYM,
    HUB,
    NO_DATA,
    DataSection,
    EvaluationSection,
    ReadingSection,
    RewardSpec,
    SourceSpec,
    check_rewards,
)
from tpu_grpo.config.effects import EFFECTS, Effect, effect_of, listed_name
from tpu_grpo.config.environment import EnvironmentSection
from tpu_grpo.config.learning import (
    AdvantageName,
    AlgorithmSection,
    LossAggregation,
    OptimizerRule,
    OptimizerSection,
    UpdateSection,
)
from tpu_grpo.config.listing import settings
from tpu_grpo.config.loading import changed_config, load_config, parse_config
from tpu_grpo.config.rules import CACHE_MARGIN_TOKENS, PROMPT_MARGIN_TOKENS
from tpu_grpo.config.run_config import MICRO_BATCHES, RunConfig
from tpu_grpo.config.section import Section, parse_layers
from tpu_grpo.config.sections import (
    CheckpointSection,
    ExportSection,
    HostsSection,
    LoggingSection,
    LoraSection,
    MeshesSection,
    ModelSection,
    RolloutSection,
    RunSection,
)

__all__ = [
    "BUILTIN",
    "BUILTIN_TASK",
    "CACHE_MARGIN_TOKENS",
    "EFFECTS",
    "GIVEN",
    "GYM",
    "HUB",
    "MICRO_BATCHES",
    "NO_DATA",
    "PROMPT_MARGIN_TOKENS",
    "AdvantageName",
    "AlgorithmSection",
    "CheckpointSection",
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
    "OptimizerRule",
    "OptimizerSection",
    "ReadingSection",
    "RewardSpec",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "Section",
    "SourceSpec",
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
