"""The prompts of a run, opened before anything that takes time is imported, so that a wrong line is said soon."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_grpo.config import RunConfig
from tpu_grpo.prompts import PromptStream, open_evaluation_prompts, open_prompts
from tpu_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class OpenData:
    """OpenData holds the prompts to train on, and those that are kept for evaluation."""

    prompts: PromptStream
    held_out: tuple[Prompt, ...] | None
    """None if the config has none."""


def open_data(config: RunConfig, tokenizer: "PreTrainedTokenizerFast") -> OpenData:
    """Read and check all data of a run.

    Raises:
        ConfigError: for templates that do not fit the data or the tokenizer.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
    """
    prompts = open_prompts(config.data, config.run.seed, tokenizer)
    return OpenData(prompts, open_evaluation_prompts(config.evaluation, config.data, tokenizer))
