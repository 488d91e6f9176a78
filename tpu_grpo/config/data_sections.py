"""The settings of prompts, of the rewards that score completions, and of evaluation on held-out prompts."""

import bisect
import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from tpu_grpo.config.section import Day, Options, PlainName, PositiveInt, Section, must
from tpu_grpo.records.errors import LARGEST_REWARD
from tpu_grpo.records.secrets import HAS_PASSWORD

BUILTIN = "builtin:"
"""The prefix of a path that names a built-in task."""
GYM = "reasoning_gym:"
"""The prefix of a path that names a task of reasoning-gym."""
HUB = "hf:"
"""The prefix of a path that names a dataset (or a model) of the Hugging Face hub."""
BUILTIN_TASK = f"{BUILTIN}addition"
NO_DATA = f"{BUILTIN}environment"
"""The path for prompts that come from environments: every prompt is an empty message, to which the conversation adds
the result of ``reset``."""
GIVEN = "python:"
"""The prefix in the name of a reward that was passed to `tpu_grpo.train` as a function."""


def _can_be_a_path(given: Any) -> bool:
    """Whether files can have these paths; URLs pass."""
    paths = [str(path) for path in (given if isinstance(given, list | tuple) else [given]) if "://" not in str(path)]
    try:
        whole = [os.fsencode(Path(path).expanduser()) for path in paths]
    except RuntimeError:  # ~somebody who is not there
        return False
    return all(len(path) < 4096 and max(map(len, path.split(b"/"))) < 256 for path in whole)


LIMITS = "be a path that files can have, of at most 255 bytes in each part and 4095 in all, got {!s:.200}; correct it"
IsPath = BeforeValidator(must(LIMITS, _can_be_a_path))


def _no_blanks(value: dict[str, str]) -> dict[str, str]:
    if blank := [name for name, column in value.items() if not name or not column]:
        raise ValueError(f"must map names to columns, got an empty one for {blank[0]!r}; e.g. {{question: problem}}")
    return value


Columns = Annotated[dict[str, str], AfterValidator(_no_blanks)]


def _without_passwords(paths: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if found := [path for path in ([paths] if isinstance(paths, str) else paths) if HAS_PASSWORD.search(path)]:
        place = found[0].rpartition("@")[2]
        raise ValueError(
            f"must not hold a password, which logs and config.yaml would show, got one for {place}; "
            "name a variable of the environment in its place: https://me:$MY_PASSWORD@example.org/train.jsonl"
        )
    return paths


Paths = Annotated[
    str | tuple[str, ...],
    IsPath,
    AfterValidator(must("name a source, got {!r}; builtin:addition is the default", len)),
    AfterValidator(_without_passwords),
]
"""A path, or a list of paths."""


class ReadingSection(Section):
    """These settings say how the records at a path are read."""

    split: str | None = None
    """Read this split of a Hugging Face dataset; when unset, the split train, or test for an evaluation."""
    subset: str | None = None
    """Read this configuration of a Hugging Face dataset, e.g. main."""
    options: Options = Field(default={})
    """Pass these keyword arguments to a function, to a reasoning-gym task, or to datasets.load_dataset."""
    columns: Columns = Field(default={})
    """Read columns under other names, {name: column}, e.g. {question: problem}; a dot reaches into a column:
    {answer: reward_model.ground_truth}."""


class SourceSpec(ReadingSection):
    """This is one source of a mixture."""

    path: Paths
    """Read this source's records from here; it takes everything that data.path takes."""
    weight: float = Field(default=1.0, gt=0.0)
    """Take this weight, divided by the sum of all sources' weights, as the source's share of the prompts."""
    name: PlainName | None = None
    """Use this name for the source in the column `source` and in messages; source0, source1, ... when unset."""
    prompt_template: str | None = None
    """Write this source's prompts with this template; with data.prompt_template when unset."""


class DynamicSection(Section):
    """These settings fill a step with groups whose rewards differ (dynamic sampling, DAPO, arXiv 2503.14476)."""

    extra: float = Field(default=0.0, ge=0.0, le=1000.0)
    """In every round, sample prompts_per_step * (1 + extra) prompts, rounded up. The step learns from the first
    prompts_per_step groups whose rewards differ, in the order of the prompts."""
    rounds: PositiveInt = 1
    """Sample up to this many rounds, until enough groups have rewards that differ. If there are too few after the last
    round, groups of equal rewards fill up the step; they have weight 0."""

    @property
    def is_on(self) -> bool:
        """Whether a step may sample more prompts than it learns from."""
        return self.extra > 0.0 or self.rounds > 1


class PoolsSection(Section):
    """These settings sample prompts more or less often by their past pass rate, the mean reward of their last group."""

    edges: tuple[float, ...] = ()
    """Divide prompts by pass rate into pools: [0.25, 0.75] makes three pools, for rates up to 0.25, above 0.25 up to
    0.75, and above 0.75."""
    weights: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] = ()
    """Sample a prompt, when its turn comes, with the probability of its pool, e.g. [0.2, 1, 0.2]; otherwise skip it.
    Prompts that were never sampled before are always sampled."""

    @model_validator(mode="after")
    def _weights_fit(self) -> "PoolsSection":
        if not self.edges and not self.weights:
            return self
        if any(upper <= lower for lower, upper in pairwise(self.edges)):
            raise ValueError(f"edges must ascend, got {list(self.edges)}; sort them, and name each once")
        if len(self.weights) != len(self.edges) + 1:
            raise ValueError(
                f"weights must be one more than edges, got {list(self.weights)} for {list(self.edges)}; there is a "
                "pool below each edge and one above the last"
            )
        if not any(self.weights):
            raise ValueError(f"weights must not all be 0, got {list(self.weights)}; no prompt would come twice")
        return self


class RetireSection(Section):
    """These settings stop sampling prompts that the policy has learnt."""

    at: float | None = None
    """Count a prompt as passed if its pass rate is at least this, e.g. 0.9; when unset, no prompt is retired."""
    times: PositiveInt = 2
    """Never sample a prompt again after it was passed this many times in a row."""


class DataSection(ReadingSection):
    """These settings say where prompts come from and how they are written."""

    path: Paths = BUILTIN_TASK
    """Read the records from here: a .jsonl, .json, .parquet, .arrow, .csv or .tsv file, also gzipped (.gz), a pattern
    such as data/*.jsonl, a URL (https://, gs://), or a list of these; hf:NAME (a dataset of the Hugging Face hub) or
    the directory of a dataset; reasoning_gym:TASK; path.py:function or package.module:function; builtin:addition (sums
    of two digits); builtin:calculator (sums of three digits); builtin:guessing (numbers to be found); or
    builtin:environment, for environments whose reset gives the prompt."""
    sources: tuple[SourceSpec, ...] = ()
    """Mix these sources, instead of reading data.path alone."""
    prompt_template: str = "{question}"
    """Write the user's message with this Python format string over the record's columns. By default, the column prompt
    replaces a missing question. If the template is one column that holds messages, these are the conversation."""
    messages: str | None = None
    """Take the conversation from this column, a list of {role, content}, instead of data.prompt_template."""
    system_prompt: str = ""
    """Put this system message before the user's; none when empty."""
    chat_template: bool = True
    """Render the messages through the tokenizer's chat template; otherwise the user's message alone is the prompt."""
    thinking: bool | None = None
    """Set the chat template's thinking switch (enable_thinking, or thinking); the template's own default when unset."""
    date: Day = "2024-07-26"
    """Tell this day, YYYY-MM-DD, to a chat template that asks for today's date, so that prompts are the same on every
    host and day."""
    prompts_per_step: PositiveInt = 8
    """Learn from this many prompts, called P, in each step; each is sampled algorithm.group_size times."""
    max_prompt_tokens: PositiveInt = 512
    """Accept prompts of up to this many tokens."""
    too_long: Literal["error", "drop"] = "error"
    """Stop at a prompt longer than data.max_prompt_tokens, or drop it; dropped prompts are counted and reported."""
    shuffle: bool = True
    """Shuffle every epoch, by run.seed."""
    curriculum: str | None = None
    """Sort the prompts of every epoch by this column, smallest value first; equal values are shuffled. In a mixture,
    each source is sorted by itself."""
    dynamic: DynamicSection = DynamicSection()
    pools: PoolsSection = PoolsSection()
    retire: RetireSection = RetireSection()

    @property
    def builtin(self) -> str | None:
        """The path of the built-in task, which also has held-out prompts; None for other data."""
        path = self.path
        has_held_out = isinstance(path, str) and path.startswith(BUILTIN) and path != NO_DATA and not self.sources
        return str(path) if has_held_out else None

    @property
    def prompts_per_round(self) -> int:
        """The number of prompts sampled in a round: prompts_per_step * (1 + dynamic.extra), rounded up."""
        return self.prompts_with(self.dynamic.extra)

    def prompts_with(self, extra: float) -> int:
        """Return prompts_per_step * (1 + extra), rounded up."""
        more = round(self.prompts_per_step * extra, 6)  # as 30 * 0.1 > 3 in floating point
        return self.prompts_per_step + math.ceil(more)

    @property
    def remembers(self) -> bool:
        """Whether the prompts of a step depend on the results of earlier steps."""
        return self.dynamic.is_on or bool(self.pools.weights) or self.retire.at is not None


class RewardSpec(Section):
    """This is one reward of the list."""

    name: str
    """Score with this reward: a shipped name (docs/rewards.md lists them), an installed entry point, path.py:function
    or package.module:function."""
    label: PlainName | None = None
    """Use this name for the reward in metrics; when unset, the shipped name or the function's."""
    weight: Annotated[
        float | dict[int, float],
        AfterValidator(
            must(
                "be a number or a schedule {{step: factor}} of steps >= 0, got {}",
                lambda value: not isinstance(value, dict) or (value and min(value) >= 0),
            )
        ),
    ] = 1.0
    """Multiply this reward by this factor in the sum; or by a schedule {step: factor}, interpolated linearly between
    these steps."""
    options: Options = Field(default={})
    """Pass these keyword arguments to a reward function at every call, or to a reward class's constructor once."""
    only_if: str | None = None
    """Score with this reward only the rows that another reward, named as in metrics, scores above 0; all other rows
    get 0."""
    workers: int | None = Field(default=None, ge=0, lt=2**31)
    """Run the reward in this many separate processes; 0 calls it in the main process, which suits only cheap rewards
    that cannot hang. Unset: 1 for your own rewards and for shipped rewards that run foreign code or long computations,
    else 0."""
    early: bool | None = None
    """Score each group in a separate call as soon as its completions are complete, while other groups are sampled.
    Unset: true for functions of one row in workers and for shipped rewards, which score each row by itself."""
    timeout: float = Field(default=60.0, gt=0.0)
    """Give the reward this many seconds for each batch, and once the rollout has ended, for all remaining rows."""
    on_error: Literal["stop", "skip", "value"] = "stop"
    """Do this when the reward raises, times out, dies or returns something other than a number. stop: the run ends and
    says why (but a shipped reward that times out or dies skips these rows, because a policy can write texts for which
    it does); skip: the rows concerned go without this reward, and a row without any reward has the advantage 0;
    value: the rows concerned get error_value."""
    error_value: float = Field(default=0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD)
    """Give this value to the rows concerned when on_error is value."""
    messages: bool = False
    """Pass prompts and completions as lists of messages {role, content} instead of texts: each prompt as all messages
    before the model's first answer, and each completion as that answer and, with an environment, all later messages."""
    recycle: PositiveInt = 1000
    """Replace a worker process by a fresh one after this many calls."""
    memory_gb: float = Field(default=8.0, gt=0.0)
    """Let a worker process allocate this much memory, in GB."""
    secrets: tuple[str, ...] = ()
    """Pass these environment variables on to worker processes, e.g. [MY_API_KEY]; variables whose names look secret,
    such as HF_TOKEN, are withheld otherwise."""
    deterministic: bool | None = None
    """Promise that the same text always gets the same value: hosts then compare values on one group per step. Unset:
    true, except for the shipped judge. Set this to false if your own reward asks a model, or is random."""

    _function: Any = PrivateAttr(default=None)

    @property
    def function(self) -> Any:
        """The function passed to `tpu_grpo.train`, known to this process only; None for an importable reward."""
        return self._function

    def calling(self, function: Any) -> Self:
        """Return this entry with a function that exists in this process only."""
        entry = self.model_copy()
        entry._function = function
        return entry

    @property
    def shown(self) -> str:
        """The reward's name in metrics."""
        return self.label or self.name.rpartition(":")[2]

    def weight_at(self, step: int) -> float:
        """Return the weight at a step; before a schedule's first and after its last step, the nearest value applies.

        With ``{100: 0, 200: 1}`` it is 0 at step 100, 0.5 at step 150 and 1 from step 200 on.
        """
        if not isinstance(self.weight, dict):
            return self.weight
        steps = sorted(self.weight)
        later = bisect.bisect_right(steps, step)
        if later in (0, len(steps)):
            return self.weight[steps[min(later, len(steps) - 1)]]
        start, end = steps[later - 1], steps[later]
        done = (step - start) / (end - start)
        return (1.0 - done) * self.weight[start] + done * self.weight[end]


def check_rewards(specs: Sequence[RewardSpec]) -> None:
    """Check that rewards have different names and that each ``only_if`` names one of them. Raises ValueError for two
    rewards with one name, an ``only_if`` without such a reward, or a cycle of ``only_if``."""
    shown = [spec.shown for spec in specs]
    if twice := sorted({name for name in shown if shown.count(name) > 1}):
        raise ValueError(
            f"rewards must have names of their own in the metrics, got {twice} twice; give one of them a label"
        )
    gates = {spec.shown: spec.only_if for spec in specs}
    for name, gate in gates.items():
        if gate is not None and gate not in gates:
            raise ValueError(f"rewards: only_if of {name} must name another reward, got {gate!r}; there are {shown}")
    for name, gate in gates.items():
        passed = [name]
        while gate is not None:
            if gate in passed:
                raise ValueError(f"rewards: only_if must not lead back, got {' <- '.join([*passed, gate])}; drop one")
            passed.append(gate)
            gate = gates[gate]


class EvaluationSection(ReadingSection):
    """These settings measure accuracy on prompts that are not trained on."""

    path: Paths | None = None
    """Read held-out records from here, anything that data.path takes. When unset, a built-in task is evaluated on
    held-out problems of its own, and other data is not evaluated."""
    prompt_template: str | None = None
    """Write the prompts of the evaluation with this template; with data.prompt_template when unset."""
    every: int = Field(default=0, ge=0, lt=2**31)
    """Evaluate at this interval of steps; 0 evaluates only before the first step and after the last."""
    prompts: PositiveInt = 256
    """Evaluate this many prompts; each is answered once greedily, and evaluation.samples times by sampling."""
    samples: PositiveInt = 1
    """Sample this many answers per prompt. pass@k and maj@k are reported for the powers of 2 from 2 up to this."""
    temperature: float | None = Field(default=None, gt=0.0, le=100.0)
    """Sample the answers at this temperature, without top-k, top-p or min-p; rollout.temperature when unset."""
    rewards: tuple[RewardSpec, ...] | None = None
    """Score evaluations with this list of rewards; with the run's rewards when unset."""
    best: str | None = None
    """Choose the best checkpoint by the highest value of this result, e.g. greedy/gsm8k or pass@8/math; when unset, by
    the greedy result of the first reward."""

    @property
    def every_k(self) -> tuple[int, ...]:
        """The values of k for pass@k and maj@k, powers of two, such as 2 and 4 for 6 samples."""
        return tuple(2**n for n in range(1, self.samples.bit_length()))
