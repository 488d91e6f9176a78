# The public names of this package, for type checkers and for the loader, which imports them when they are first used.

from .api import train as train
from .cli.starting import start as start
from .config import RunConfig as RunConfig, load_config as load_config, parse_config as parse_config
from .records.episode import Episode as Episode, Turn as Turn
from .records.errors import (
    CallbackError as CallbackError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    DiskError as DiskError,
    EpisodeError as EpisodeError,
    Interrupted as Interrupted,
    LaunchError as LaunchError,
    LockstepError as LockstepError,
    NonFiniteError as NonFiniteError,
    PlanningError as PlanningError,
    RequestError as RequestError,
    RewardError as RewardError,
    TpuGrpoError as TpuGrpoError,
    WeightsError as WeightsError,
)
from .records.stages import (
    AnswerMode as AnswerMode,
    Completion as Completion,
    Figure as Figure,
    Histogram as Histogram,
    Prompt as Prompt,
    PromptBatch as PromptBatch,
    Request as Request,
    Rollout as Rollout,
    SampleKey as SampleKey,
    SamplingParams as SamplingParams,
    ScoredRollout as ScoredRollout,
    Scores as Scores,
    SyncResult as SyncResult,
    UpdateResult as UpdateResult,
)
