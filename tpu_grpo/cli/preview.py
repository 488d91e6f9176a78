"""Reads the prompts of a config as the model will see them: their texts, tokens, columns and lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import RunConfig
from tpu_grpo.data.stream import PromptStream
from tpu_grpo.records.stages import Prompt
from tpu_grpo.run.inputs import open_inputs

MEASURED = 10_000
"""Of more prompts than these, only so many are measured, because every one has to be made into tokens for it."""


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
    measured: int
    """So many prompts were measured, spread evenly over all."""

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> "Lengths":
        """Measure prompts, at most MEASURED; the median of an even number is the upper of the two in the middle."""
        count = min(len(prompts), MEASURED)
        chosen = prompts if count == len(prompts) else (prompts[n * len(prompts) // count] for n in range(count))
        lengths = sorted(len(prompt.token_ids) for prompt in chosen)
        return cls(lengths[0], lengths[len(lengths) // 2], lengths[-1], count)


def open_preview(config: RunConfig) -> Preview:
    """Read and render the data of a config; needs the model's tokenizer, not its weights.

    Raises:
        TpuGrpoError: for data, templates or a tokenizer that do not fit.
    """
    inputs = open_inputs(config)
    held_out = () if inputs.held_out is None else inputs.held_out.prompts
    return Preview(inputs.prompts, held_out, inputs.tokenizer)


def shown_value(value: Any, most: int = 200) -> str:
    """Show a column's value on one line of at most ``most`` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
