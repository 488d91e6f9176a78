"""What a run reads: model, environments, rewards and prompts, each opened and checked once, before jax is imported.

What is quick comes first, so that a typing error is answered at once: files of the model and of the data are looked
into before a tokenizer is imported.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu_grpo.config import DataSection, RunConfig
from tpu_grpo.data.chat_messages import Conversation
from tpu_grpo.data.lazy_records import Record
from tpu_grpo.data.rendering import ToolsOf
from tpu_grpo.data.sources import Source, glance
from tpu_grpo.data.stream import PromptStream, open_evaluation_prompts, open_prompts, with_template
from tpu_grpo.environments.actions import COLUMN, LoadedEnvironment
from tpu_grpo.models.checkpoint import Checkpoint
from tpu_grpo.records.errors import ConfigError, DataError, EpisodeError
from tpu_grpo.records.stages import Prompt
from tpu_grpo.rewards import RewardSet, open_rewards
from tpu_grpo.run.model_files import open_tokenizer, read_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class HeldOutInputs:
    """Prompts that are kept for evaluation, with the rewards that score their answers."""

    prompts: tuple[Prompt, ...]
    rewards: RewardSet


@dataclass(frozen=True)
class Inputs:
    """Everything that a run reads; the processes of rewards start when they are first needed."""

    checkpoint: Checkpoint | None
    """None for a built-in model, which is taught when the run is built."""
    tokenizer: "PreTrainedTokenizerFast"
    environments: Mapping[str, LoadedEnvironment]
    """What prompts begin conversations with, by the names that the data has for them; empty for plain completions."""
    prompts: PromptStream
    rewards: RewardSet
    held_out: HeldOutInputs | None
    """None if the config has no held-out prompts."""


def open_inputs(config: RunConfig, reading: Callable[[], None] = lambda: None) -> Inputs:
    """Open and check everything that a run reads.

    Args:
        config: the run.
        reading: is called before the data is read whole, which can take time.

    Raises:
        ConfigError: for templates, columns and settings that do not fit data, tokenizer or model.
        CheckpointError: for a model or tokenizer that is missing, broken or not supported.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
        RewardError: for a reward that cannot be loaded, or does not fit the data.
        EpisodeError: for an environment that cannot be found, or is not written as one.
    """
    checkpoint = read_model(config)
    environments = load_environments(config)
    columns, held_columns = _columns_at_a_glance(config)
    rewards = None if columns is None else _open_rewards(config, environments, columns)
    held_rewards = None if held_columns is None else _rewards_of_evaluation(config, held_columns, rewards)
    reading()
    tokenizer, tools = open_tokenizer(config, checkpoint), tools_of(environments)
    prompts = open_prompts(config.data, config.run.seed, tokenizer, tools)
    rewards = rewards or _open_rewards(config, environments, prompts.columns)
    held_out = open_held_out(config, tokenizer, environments, held_rewards, rewards)
    return Inputs(checkpoint, tokenizer, environments, prompts, rewards, held_out)


def open_held_out(
    config: RunConfig,
    tokenizer: "PreTrainedTokenizerFast",
    environments: Mapping[str, LoadedEnvironment],
    rewards: RewardSet | None = None,
    of_run: RewardSet | None = None,
) -> HeldOutInputs | None:
    """Open the held-out prompts and their rewards; None if the config has none. Raises as `open_inputs` does.

    Args:
        config: the run.
        tokenizer: the model's.
        environments: what prompts begin conversations with.
        rewards: those of held-out prompts, if they are open already.
        of_run: the rewards of the run, if they are open already.
    """
    prompts = open_evaluation_prompts(config.evaluation, config.data, tokenizer, tools_of(environments))
    if prompts is None:
        return None
    columns = tuple(prompts[0].columns)
    check_environment_columns(environments, columns)
    return HeldOutInputs(prompts, rewards or _rewards_of_evaluation(config, columns, of_run))


def _open_rewards(
    config: RunConfig, environments: Mapping[str, LoadedEnvironment], columns: Collection[str]
) -> RewardSet:
    check_environment_columns(environments, columns)
    return open_rewards(config.rewards, columns, config.run.max_steps)


def _rewards_of_evaluation(config: RunConfig, columns: Collection[str], of_run: RewardSet | None) -> RewardSet:
    """Open the rewards of held-out prompts; those of the run, if they are the same, with the processes that it has."""
    own = config.evaluation.rewards
    if own is None and of_run is not None:
        return of_run.for_columns(columns)
    return open_rewards(config.rewards if own is None else own, columns, config.run.max_steps)


# --- data at a glance ------------------------------------------------------------------------------------------------


def _columns_at_a_glance(config: RunConfig) -> tuple[Collection[str] | None, Collection[str] | None]:
    """Return the columns of the training data and of the held-out data, each None where finding out takes time.

    The first record of every source is looked at, and has to fit its template.
    """
    data, section = config.data, config.evaluation
    records = [_first_record(source, style) for source, style in _sources(config)]
    columns = None
    if all(record is not None for record in records):
        columns = list(dict.fromkeys(name for record in records if record is not None for name in record))
        if data.curriculum is not None and data.curriculum not in columns:
            raise ConfigError(
                f"data.curriculum={data.curriculum} must be a column, the data has {', '.join(columns)}; correct it"
            )
        columns += ["source"] if data.sources else []
    path = section.path if section.path is not None else data.builtin
    if path is None:
        return columns, None
    source = Source(path, section, "heldout", "evaluation.path")
    return columns, _first_record(source, with_template(data, section.prompt_template))


def _sources(config: RunConfig) -> Iterator[tuple[Source, DataSection]]:
    """Yield every source of training prompts, and how they are written."""
    data = config.data
    if not data.sources:
        yield Source(data.path, data), data
    for index, spec in enumerate(data.sources):
        source = Source(spec.path, spec, setting=f"data.sources.{index}.path")
        yield source, with_template(data, spec.prompt_template)


def _first_record(source: Source, style: DataSection) -> Record | None:
    if (record := glance(source)) is not None:
        Conversation(style).messages(record, f"record 0 of {source.name} (from 0)")
    return record


# --- environments ----------------------------------------------------------------------------------------------------


def load_environments(config: RunConfig) -> dict[str, LoadedEnvironment]:
    """Find the environments of a config, by the names that the data has for them; "" for the only one.

    Raises:
        EpisodeError: for one that cannot be found, or is not written as an environment, or where none gives rewards
            that the config wants of them.
    """
    if not config.environment.is_on:
        return {}
    from tpu_grpo.environments.environment_classes import load_environment  # a second to import

    section = config.environment
    loaded = {name: load_environment(source, section.options, name) for name, source in section.names.items()}
    names = ", ".join(environment.name for environment in loaded.values())
    specs = [*config.rewards, *(config.evaluation.rewards or ())]
    if any(spec.name == "environment" for spec in specs) and not any(one.gives_reward for one in loaded.values()):
        raise EpisodeError(
            f"the reward environment, which is the only one unless rewards names others, needs an environment with "
            f"get_reward, get_turn_rewards or step, got {names} without; add one of these methods, or set rewards"
        )
    if section.turn_credit == "turn" and not any(one.gives_turn_rewards for one in loaded.values()):
        raise EpisodeError(
            f"environment.turn_credit=turn needs an environment with get_turn_rewards or step, got {names} without; "
            "add one of them, or leave it at episode"
        )
    return loaded


def check_environment_columns(loaded: Mapping[str, LoadedEnvironment], columns: Collection[str]) -> None:
    """See that records with these columns have what choosing an environment and its ``reset`` need.

    Raises:
        DataError: for a column that is missing.
    """
    if not loaded:
        return
    from tpu_grpo.environments.environment_classes import check_columns

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
