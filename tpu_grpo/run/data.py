"""The prompts of a run, opened before anything that takes time is imported, so that a wrong line is said soon."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tpu_grpo.config import RunConfig
from tpu_grpo.data import PromptStream, open_evaluation_prompts, open_prompts
from tpu_grpo.environments.actions import LoadedEnvironment
from tpu_grpo.records.stages import Prompt
from tpu_grpo.run.environments import check_environment_columns, load_environments, tools_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class OpenData:
    """OpenData holds the prompts to train on, and those that are kept for evaluation."""

    prompts: PromptStream
    held_out: tuple[Prompt, ...] | None
    """None if the config has none."""
    environments: Mapping[str, LoadedEnvironment] = field(default_factory=dict)
    """What prompts begin conversations with, by the names that the data has for them; empty for plain completions."""


def open_data(config: RunConfig, tokenizer: "PreTrainedTokenizerFast") -> OpenData:
    """Read and check all data of a run.

    Raises:
        ConfigError: for templates that do not fit the data or the tokenizer.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
        EpisodeError: for an environment that cannot be found, or is not written as one.
    """
    environments = load_environments(config)
    tools = tools_of(environments)
    prompts = open_prompts(config.data, config.run.seed, tokenizer, tools)
    held_out = open_evaluation_prompts(config.evaluation, config.data, tokenizer, tools)
    for columns in (prompts.columns, tuple(held_out[0].columns) if held_out else ()):
        if columns:
            check_environment_columns(environments, columns)
    return OpenData(prompts, held_out, environments)
