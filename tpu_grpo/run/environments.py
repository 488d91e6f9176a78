"""The environments of a run: found and checked before its prompts are read, and opened once its rewards are.

loaded = load_environments(config)                  # {"": LoadedEnvironment(...)}; {} for a run without
tools_of(loaded)                                    # what each prompt offers
environments = open_environments(config, tokenizer, loaded, keep=False)
stop_ids(config, tokenizer, directory)              # also of a run without
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_grpo.config import RunConfig
from tpu_grpo.data.rendering import ToolsOf, template_switches
from tpu_grpo.environments.actions import COLUMN, LoadedEnvironment
from tpu_grpo.records.errors import DataError, EpisodeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tpu_grpo.environments.episodes import Environments


def load_environments(config: RunConfig) -> dict[str, LoadedEnvironment]:
    """Find the environments of a config, by the names that the data has for them; "" for the only one.

    Raises:
        EpisodeError: for one that cannot be found, or is not written as an environment, or where none gives rewards
            that the config wants of them.
    """
    if not config.environment.is_on:
        return {}
    from tpu_grpo.environments.loading import load_environment  # a second to import

    section = config.environment
    loaded = {name: load_environment(source, section.options, name) for name, source in section.names.items()}
    _check_rewards(config, loaded)
    return loaded


def _check_rewards(config: RunConfig, loaded: Mapping[str, LoadedEnvironment]) -> None:
    names = ", ".join(environment.name for environment in loaded.values())
    specs = [*config.rewards, *(config.evaluation.rewards or ())]
    if any(spec.name == "environment" for spec in specs) and not any(one.gives_reward for one in loaded.values()):
        raise EpisodeError(
            f"the reward environment, which is the only one unless rewards names others, needs an environment with "
            f"get_reward, get_turn_rewards or step, got {names} without; add one of these methods, or set rewards"
        )
    if config.environment.turn_credit == "turn" and not any(one.gives_turn_rewards for one in loaded.values()):
        raise EpisodeError(
            f"environment.turn_credit=turn needs an environment with get_turn_rewards or step, got {names} without; "
            "add one of them, or leave it at episode"
        )


def check_environment_columns(loaded: Mapping[str, LoadedEnvironment], columns: Collection[str]) -> None:
    """See that records with these columns have what choosing an environment and its ``reset`` need.

    Raises:
        DataError: for a column that is missing.
    """
    if not loaded:
        return
    from tpu_grpo.environments.loading import check_columns

    if "" not in loaded and COLUMN not in columns:
        raise DataError(
            f"several environments need a column {COLUMN!r} that chooses among {', '.join(loaded)}, the data has "
            f"{', '.join(columns)}; add it"
        )
    for name, environment in loaded.items():
        check_columns(environment, [column for column in columns if not name or column != COLUMN])


def tools_of(loaded: Mapping[str, LoadedEnvironment]) -> ToolsOf | None:
    """Return what says which tools a record's prompt offers; None for a run without environments."""
    if not loaded:
        return None

    def tools(record: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
        name = "" if "" in loaded else str(record.get(COLUMN))
        if name not in loaded:
            raise DataError(
                f"the column {COLUMN!r} must name one of the environments {', '.join(loaded)}, got {name!r} in {where}"
            )
        return loaded[name].tools

    return tools


def stop_ids(config: RunConfig, tokenizer: "PreTrainedTokenizerFast", directory: Path) -> tuple[int, ...]:
    """Return the ids that end what a run's policy writes, ascending.

    They are the model's own, and in conversations those with which the chat template ends turns: a base model's own end
    token is another one.

    Args:
        config: the run.
        tokenizer: the model's.
        directory: the model's, in which config.json and generation_config.json lie.

    Raises:
        CheckpointError: for a broken file of the model's.
        ConfigError: for conversations by a chat template that ends no turns.
    """
    from tpu_grpo.models.tokenizers import stop_token_ids  # a second to import

    ids = {*stop_token_ids(tokenizer, directory)}
    if config.environment.is_on:
        from tpu_grpo.environments.dialects import turn_ends

        ids.update(turn_ends(tokenizer, template_switches(config.data, tokenizer)))
    return tuple(sorted(ids))


def open_environments(
    config: RunConfig,
    tokenizer: "PreTrainedTokenizerFast",
    loaded: Mapping[str, LoadedEnvironment],
    *,
    keep: bool,
) -> "Environments | None":
    """Open the environments of a run; None for one without.

    Args:
        config: the run.
        tokenizer: the model's.
        loaded: what ``load_environments`` returned.
        keep: whether the environments' attributes are kept for rewards.

    Raises:
        ConfigError: for a chat template that cannot write tools or several turns.
    """
    if not loaded:
        return None
    from tpu_grpo.environments.dialects import open_dialect
    from tpu_grpo.environments.episodes import Environments
    from tpu_grpo.environments.pool import EnvironmentPool

    section, switches = config.environment, template_switches(config.data, tokenizer)
    dialects = {
        name: open_dialect(tokenizer, environment.tools, section.tool_format, switches)
        for name, environment in loaded.items()
    }
    return Environments(
        loaded, dialects, EnvironmentPool(loaded, section, keep), section, config.data.max_prompt_tokens
    )
