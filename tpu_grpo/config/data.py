"""Where prompts come from, for training and for evaluation, and how they are written."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from tpu_grpo.config.rewards import RewardSpec
from tpu_grpo.config.section import PositiveInt, Section

BUILTIN = "builtin:"
GYM = "reasoning_gym:"
"""Before a task of reasoning-gym."""
HUB = "hf:"
"""Before the name of a dataset of the Hugging Face hub."""
BUILTIN_TASK = f"{BUILTIN}addition"


def _no_blanks(value: dict[str, str]) -> dict[str, str]:
    if blank := [name for name, column in value.items() if not name or not column]:
        raise ValueError(f"must map names to columns, got an empty one for {blank[0]!r}; e.g. {{question: problem}}")
    return value


Columns = Annotated[dict[str, str], AfterValidator(_no_blanks)]


class ReadingSection(Section):
    """How a source is read, beside its path."""

    split: str | None = None
    """Of a Hugging Face dataset: its split; when unset train, or test for an evaluation."""
    subset: str | None = None
    """Of a Hugging Face dataset: its configuration, e.g. main."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of a function, of a reasoning-gym task, or of datasets.load_dataset."""
    columns: Columns = Field(default={})
    """Columns under other names, {name: column}, e.g. {question: problem}; a dot reaches into a column:
    {answer: reward_model.ground_truth}."""


class SourceSpec(ReadingSection):
    """One source of a mixture."""

    path: str
    """As data.path."""
    weight: float = Field(default=1.0, gt=0.0)
    """Its share of the prompts, beside the other sources' weights."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """What the column `source` and messages call it; source0, source1, ... when unset."""
    prompt_template: str | None = None
    """Instead of data.prompt_template."""


class DataSection(ReadingSection):
    """Where prompts come from and how they are written."""

    path: str = BUILTIN_TASK
    """A .jsonl, .parquet or .csv file; hf:NAME (a dataset of the Hugging Face hub) or the directory of one;
    reasoning_gym:TASK; path.py:function or package.module:function; or builtin:addition (two-digit sums)."""
    sources: tuple[SourceSpec, ...] = ()
    """A mixture, instead of data.path."""
    prompt_template: str = "{question}"
    """Python format string over the record's columns that gives the user's message."""
    messages: str | None = None
    """A column that holds the conversation as a list of {role, content}, instead of data.prompt_template."""
    system_prompt: str = ""
    """A system message before it; none when empty."""
    examples: tuple[dict[str, Any], ...] = ()
    """Records shown before every prompt with their answers (few-shot)."""
    example_template: str = "{answer}"
    """Python format string over an example's columns that gives its answer."""
    chat_template: bool = True
    """Render the messages through the tokenizer's chat template; otherwise the user's message alone is the prompt."""
    thinking: bool | None = None
    """The chat template's thinking switch (enable_thinking, or thinking); its own default when unset."""
    prompts_per_step: PositiveInt = 8
    """P: prompts of one step; each is sampled algorithm.group_size times."""
    max_prompt_tokens: PositiveInt = 512
    """Longest prompt in tokens; the trainer pads prompts to it."""
    too_long: Literal["error", "drop"] = "error"
    """What to do with a longer prompt; dropped ones are counted and reported."""
    shuffle: bool = True
    """Shuffle every epoch, by run.seed."""
    curriculum: str | None = None
    """A column by which every epoch is sorted, smallest first; equal values are shuffled. In a mixture, of every
    source."""


class EvaluationSection(ReadingSection):
    """Accuracy on prompts that are not trained on."""

    path: str | None = None
    """Data as in data.path; the built-in task brings its own held-out problems; none when unset."""
    prompt_template: str | None = None
    """Instead of data.prompt_template."""
    every: int = Field(default=0, ge=0)
    """Evaluate after every this many steps; 0 only before the first and after the last."""
    prompts: PositiveInt = 256
    """Prompts per evaluation, each answered once greedily and evaluation.samples times sampled."""
    samples: PositiveInt = 1
    """n: sampled answers per prompt."""
    temperature: float | None = Field(default=None, gt=0.0, le=100.0)
    """Of the sampled answers, which no top-k, top-p or min-p filters; rollout.temperature when unset."""
    k: tuple[PositiveInt, ...] | None = None
    """For which k pass@k and maj@k are told; powers of 2 from 2 up to evaluation.samples when unset."""
    correct_from: float = 1.0
    """A sample counts as correct for pass@k and maj@k when the reward is at least this."""
    answer_pattern: str | None = None
    """Regular expression whose last match (its first group, if it has one) is the answer that maj@k counts; when unset
    boxed, tagged, after ####, or the last number."""
    rewards: tuple[RewardSpec, ...] | None = None
    """Its own list of rewards; those of the run when unset."""
    best: str | None = None
    """What the best checkpoint is the highest of, e.g. greedy/gsm8k or pass@8/math; greedy of the first reward when
    unset."""

    @property
    def every_k(self) -> tuple[int, ...]:
        """The k of pass@k and maj@k: of 6 samples 2 and 4, unless they are set."""
        return self.k if self.k is not None else tuple(2**n for n in range(1, self.samples.bit_length()))

    @field_validator("k")
    @classmethod
    def _some_k(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError(f"must name every k once, got {list(value)}; drop the double one")
        return value
