"""GRPO on TPU pod slices: Tunix learns, in-process sglang-jax engines sample, one program runs on every host.

    import tpu_grpo

    config = tpu_grpo.load_config("configs/demo_cpu.yaml", ["run.max_steps=5"])
    summary = tpu_grpo.train(config)

Every name is imported when it is first used. So ``import tpu_grpo`` costs nothing, and jax's platform can be chosen
before jax is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_grpo.api import train
    from tpu_grpo.cli.starting import start
    from tpu_grpo.config import RunConfig, load_config, parse_config
    from tpu_grpo.records.episode import Episode, Turn
    from tpu_grpo.records.errors import (
        CallbackError,
        CheckpointError,
        ConfigError,
        DataError,
        DiskError,
        EpisodeError,
        Interrupted,
        LaunchError,
        LockstepError,
        NonFiniteError,
        PlanningError,
        RequestError,
        RewardError,
        TpuGrpoError,
        WeightsError,
    )
    from tpu_grpo.records.stages import (
        AnswerMode,
        Completion,
        Figure,
        Histogram,
        Prompt,
        PromptBatch,
        Request,
        Rollout,
        SampleKey,
        SamplingParams,
        ScoredRollout,
        Scores,
        SyncResult,
        UpdateResult,
    )

__version__ = "0.1.0"

__all__ = [
    "AnswerMode",
    "CallbackError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DataError",
    "DiskError",
    "Episode",
    "EpisodeError",
    "Figure",
    "Histogram",
    "Interrupted",
    "LaunchError",
    "LockstepError",
    "NonFiniteError",
    "PlanningError",
    "Prompt",
    "PromptBatch",
    "Request",
    "RequestError",
    "RewardError",
    "Rollout",
    "RunConfig",
    "SampleKey",
    "SamplingParams",
    "ScoredRollout",
    "Scores",
    "SyncResult",
    "TpuGrpoError",
    "Turn",
    "UpdateResult",
    "WeightsError",
    "load_config",
    "parse_config",
    "start",
    "train",
]

_HOMES = {
    "train": "api",
    "start": "cli.starting",
    **dict.fromkeys(("RunConfig", "load_config", "parse_config"), "config"),
    **dict.fromkeys(("Episode", "Turn"), "records.episode"),
}
"""Name -> module. Names that are missing here are errors or records of stages."""


def __getattr__(name: str) -> Any:
    """Import a public name from the module it lives in (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    is_error = name.endswith("Error") or name == "Interrupted"
    home = _HOMES.get(name, "records.errors" if is_error else "records.stages")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
