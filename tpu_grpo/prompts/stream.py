"""An endless stream of prompt batches whose position is the step.

Three prompts a, b, c, two per step (P = 2): the stream goes through one shuffled epoch after another, and step ``s``
(counted from 1) holds its positions ``2s - 2`` and ``2s - 1``, so a batch may straddle two epochs:

    epoch 0: c a b   epoch 1: a b c   ...
    step 1: c a      step 2: b a      step 3: b c

``batch(step)`` depends on the data, the seed and the step only: every host gets the same prompts, and a checkpoint
continues from the step alone.
"""

from typing import TYPE_CHECKING

from tpu_grpo.config import DataSection, EvaluationSection
from tpu_grpo.errors import DataError
from tpu_grpo.prompts.rendering import PromptRenderer, RenderedPrompts, render_records
from tpu_grpo.prompts.sources import ADDITION, read_records
from tpu_grpo.types import Prompt, PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PromptStream:
    """Batches of P prompts, for any step, from rendered prompts.

    Raises:
        DataError: without a prompt.
    """

    def __init__(self, rendered: RenderedPrompts, *, prompts_per_step: int, seed: int, shuffle: bool):
        import grain  # imports jax, which checking and showing a config do without

        if not rendered.prompts:
            raise DataError("a stream needs at least one prompt, got none; add records to data.path")
        self._prompts = rendered.prompts
        self._prompts_per_step = prompts_per_step
        self._dropped = rendered.dropped
        order = grain.MapDataset.source(range(len(rendered.prompts)))
        # grain hashes the seed before it adds the epoch: runs with neighbouring seeds share no epoch.
        self._order = (order.seed(seed).shuffle() if shuffle else order).repeat()

    @property
    def len_epoch(self) -> int:
        """Prompts in an epoch."""
        return len(self._prompts)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the records, which the rewards get."""
        return tuple(self._prompts[0].columns)

    @property
    def dropped(self) -> int:
        """Records left out because their prompt is longer than data.max_prompt_tokens."""
        return self._dropped

    def batch(self, step: int) -> PromptBatch:
        """The P prompts of a step, counted from 1.

        Raises:
            DataError: for a step below 1.
        """
        if step < 1:
            raise DataError(f"a step must be >= 1, got {step}; steps count from 1")
        start = (step - 1) * self._prompts_per_step
        positions = range(start, start + self._prompts_per_step)
        return PromptBatch(step=step, prompts=tuple(self._at(position) for position in positions))

    def _at(self, position: int) -> Prompt:
        index = self._order[position]
        assert index is not None  # only grain's filters leave holes
        return self._prompts[index]


def open_prompts(data: DataSection, seed: int, tokenizer: "PreTrainedTokenizerFast") -> PromptStream:
    """Read, render and check every prompt of data.path; ``seed`` (run.seed) decides the shuffles.

    Raises:
        ConfigError: for templates that do not fit the data or the tokenizer.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
    """
    rendered = render_records(PromptRenderer(data, tokenizer), read_records(data.path), data, data.path)
    return PromptStream(rendered, prompts_per_step=data.prompts_per_step, seed=seed, shuffle=data.shuffle)


def open_evaluation_prompts(
    evaluation: EvaluationSection, data: DataSection, tokenizer: "PreTrainedTokenizerFast"
) -> tuple[Prompt, ...] | None:
    """The first evaluation.prompts prompts of the held-out data that fit, or all if there are fewer.

    Held-out data is evaluation.path, or the built-in task's held-out problems when it is trained on and no path is
    set; None when there is neither. They are rendered as the training prompts are.

    Raises:
        ConfigError: for templates that do not fit the data.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
    """
    path = evaluation.path
    if path is None:
        if data.path != ADDITION:
            return None
        path = ADDITION
    records = read_records(path, "heldout", setting="evaluation.path")
    return render_records(PromptRenderer(data, tokenizer), records, data, path, limit=evaluation.prompts).prompts
