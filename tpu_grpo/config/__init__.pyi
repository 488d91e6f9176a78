# The public names of this package, for type checkers and for the loader, which imports them when they are first used.

from .config_files import (
    SHIPPED_CONFIGS as SHIPPED_CONFIGS,
    changed_config as changed_config,
    load_config as load_config,
    parse_config as parse_config,
)
from .data_sections import (
    BUILTIN as BUILTIN,
    GIVEN as GIVEN,
    GYM as GYM,
    HUB as HUB,
    NO_DATA as NO_DATA,
    DataSection as DataSection,
    EvaluationSection as EvaluationSection,
    ReadingSection as ReadingSection,
    RewardSpec as RewardSpec,
    check_rewards as check_rewards,
)
from .learning_sections import (
    AlgorithmSection as AlgorithmSection,
    LossAggregation as LossAggregation,
    OptimizerSection as OptimizerSection,
    TeacherSpec as TeacherSpec,
    UpdateSection as UpdateSection,
)
from .run_config import (
    CACHE_MARGIN_TOKENS as CACHE_MARGIN_TOKENS,
    MICRO_BATCHES as MICRO_BATCHES,
    PROMPT_MARGIN_TOKENS as PROMPT_MARGIN_TOKENS,
    RunConfig as RunConfig,
    settings as settings,
)
from .section import Section as Section, parse_layers as parse_layers
from .sections import (
    EnvironmentSection as EnvironmentSection,
    ExportSection as ExportSection,
    HostsSection as HostsSection,
    LoggingSection as LoggingSection,
    LoraSection as LoraSection,
    MeshesSection as MeshesSection,
    ModelSection as ModelSection,
    RolloutSection as RolloutSection,
    RunSection as RunSection,
)
from .setting_names import (
    ARRAYS as ARRAYS,
    EVERYTHING as EVERYTHING,
    Effect as Effect,
    effect_of as effect_of,
    listed_name as listed_name,
)
