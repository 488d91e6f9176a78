"""Reads the prompts of a config as the model will see them: their texts, tokens, columns and lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import BUILTIN, RunConfig
from tpu_grpo.models.tokenizers import build_byte_tokenizer, load_tokenizer
from tpu_grpo.prompts import PromptStream, open_evaluation_prompts, open_prompts
from tpu_grpo.types import Prompt


@dataclass(frozen=True)
class Preview:
    """Holds what a run would train on."""

    stream: PromptStream
    held_out: tuple[Prompt, ...]
    tokenizer: PreTrainedTokenizerFast

    def first(self, count: int, *, step: int = 1) -> Iterator[Prompt]:
        """Yield the first ``count`` prompts that a run samples from, beginning with those of a step."""
        while count > 0:
            prompts = self.stream.batch(step).prompts[:count]
            yield from prompts
            count, step = count - len(prompts), step + 1

    def tokens(self, prompt: Prompt) -> list[tuple[int, str]]:
        """Return every token's id and the text that it stands for, as the tokenizer decodes it alone."""
        return [(token, self.tokenizer.decode([token])) for token in prompt.token_ids]


@dataclass(frozen=True)
class Lengths:
    """Says how long prompts are, in tokens."""

    shortest: int
    median: int
    longest: int

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> "Lengths":
        """Measure some prompts; the median of an even number is the upper of the two in the middle."""
        lengths = sorted(len(prompt.token_ids) for prompt in prompts)
        return cls(lengths[0], lengths[len(lengths) // 2], lengths[-1])


def open_preview(config: RunConfig) -> Preview:
    """Read and render the data of a config; needs the model's tokenizer, not its weights.

    Raises:
        TpuGrpoError: for data, templates or a tokenizer that do not fit.
    """
    if config.model.path.startswith(BUILTIN):
        tokenizer = build_byte_tokenizer()
    else:
        tokenizer = load_tokenizer(Path(config.model.path).expanduser())
    stream = open_prompts(config.data, config.run.seed, tokenizer)
    held_out = open_evaluation_prompts(config.evaluation, config.data, tokenizer)
    return Preview(stream, held_out or (), tokenizer)


def shown_value(value: Any, most: int = 200) -> str:
    """Show a column's value on one line of at most ``most`` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
