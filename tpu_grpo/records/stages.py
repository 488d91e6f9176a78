"""Frozen records: the one that each stage passes to the next, and the two between the rollout stage and its engine.

Array suffixes used throughout the package: P prompts of a step, G completions per prompt, B = P*G rows, T tokens,
V vocabulary. Row ``p * G + g`` is completion ``g`` of prompt ``p``.

    PromptBatch -> (rollout) -> Rollout -> (rewards) -> Scores -> (learner) -> UpdateResult -> (weights) -> SyncResult
                            Request -> (engine) -> Completion
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32, Integer

from tpu_grpo.records.episode import Episode

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with role, content, and other keys that chat templates know, such as tool_calls."""
FinishReason = Literal["stop", "length", "cut"]
"""Why a completion ended. stop: at a stop token. length: at its token limit. cut: it has not ended, and a later step
continues it (tpu_grpo/engine/partial_rollouts.py)."""


@dataclass(frozen=True)
class Prompt:
    """One prompt as the model sees it, with the columns of its data record, which rewards may read."""

    text: str
    """The rendered prompt: template and chat template applied."""
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: Conversation = ()
    """The messages that the text was rendered from, with the system message; empty if there were none."""

    @property
    def conversation(self) -> Conversation:
        """The messages; if there are none, the prompt's text as a single message of the user."""
        return self.messages or [{"role": "user", "content": self.text}]

    @property
    def asked(self) -> str:
        """The texts of the user's messages, joined by blank lines; without messages, the prompt's text."""
        if not self.messages:
            return self.text
        return "\n\n".join(m["content"] for m in self.messages if m["role"] == "user")

    @property
    def gold(self) -> str | None:
        """The reference answer for display, from the record's column ``answer``; None without that column."""
        answer = self.columns.get("answer")
        return None if answer is None else str(answer)


@dataclass(frozen=True)
class PromptBatch:
    """The P prompts of one step."""

    step: int
    prompts: tuple[Prompt, ...]
    records: tuple[int, ...] = ()
    """The index of each prompt among the training prompts of all sources; empty for prompts of evaluations."""
    positions: tuple[int, ...] = ()
    """The position of each prompt in the stream of training prompts, from 0; empty for prompts of evaluations."""
    round: int = 0
    """The number of the batch within the step, from 0; with data.dynamic a step may sample several batches."""

    def select(self, prompts: Sequence[int]) -> "PromptBatch":
        """Return some of the prompts, by their indices in the batch."""
        taken, records, positions = (
            tuple(values[prompt] for prompt in prompts) if values else ()
            for values in (self.prompts, self.records, self.positions)
        )
        return replace(self, prompts=taken, records=records, positions=positions)


@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of a request, applied in this order: temperature, top-k, top-p, min-p.

    Filters at their neutral values (``top_k=0``, ``top_p=1``, ``min_p=0``) do nothing. ``temperature=0`` is greedy.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    ignore_stop: bool = False
    """Continue past stop tokens, up to ``max_new_tokens``; for benchmarks."""


@dataclass(frozen=True)
class AnswerMode:
    """A way to answer prompts in an evaluation."""

    temperature: float
    """0 is greedy."""
    samples: int = 1
    """The number of completions of each prompt."""


@dataclass(frozen=True)
class SampleKey:
    """The random key of a completion. A sampled token depends only on key, position in the sequence and logits."""

    seed: int
    step: int
    prompt: int
    sample: int


@dataclass(frozen=True)
class Request:
    """One completion to generate. Requests with the same prompt (a group) share one prefill."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    key: SampleKey
    return_experts: bool = False
    """Return the experts that the engine used. The model must have experts, and the engine must be built for this."""
    return_likeliest: bool = False
    """Return the likeliest tokens in each token's place; not with ``algorithm.filtered_ratio``."""


@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request."""

    token_ids: Int32[np.ndarray, " T"]
    """The tokens after the prompt, including a final stop token."""
    logprobs: Float32[np.ndarray, " T"]
    """The log-probability of each token under the full distribution at the temperature (at 1 when greedy). With
    ``algorithm.filtered_ratio``, the distribution is over the tokens that top-k, top-p and min-p keep."""
    finish_reason: FinishReason
    cached_tokens: int
    """The number of prompt tokens whose keys and values were found in the prefix cache."""
    experts: Integer[np.ndarray, "S layers k"] | None = None
    """The experts that the engine used, if the request asked for them. The S tokens are those that the engine computed:
    the prompt and all sampled tokens but the last. `routing_dtype` chooses the dtype."""
    kept: Integer[np.ndarray, " T"] | None = None
    """How many candidates top-k, top-p and min-p kept for each token; None without ``algorithm.filtered_ratio``."""
    sampled: Bool[np.ndarray, " T"] | None = None
    """A mask of the tokens that the policy sampled; None if it sampled all. All other tokens are an environment's
    answers, with log-probability 0."""
    episode: Episode | None = None
    """The conversation with an environment that these tokens belong to."""
    ages: Int32[np.ndarray, " T"] | None = None
    """With ``rollout.partial_extra``, how many steps ago each token was sampled; None if this step sampled all
    tokens."""
    likeliest: tuple[Mapping[int, float], ...] = ()
    """For each token the 20 likeliest tokens in its place and their ``logprobs``, in descending order; empty unless the
    request asked for them."""

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self.token_ids) if self.sampled is None else int(self.sampled.sum())

    @property
    def conversation_ids(self) -> np.ndarray:
        """All tokens after the first prompt, in order, int32. Unlike ``token_ids``, they include the answers of an
        environment that are in the prompt of a later branch.

        For example, the first branch has the tokens [1 2], and the second has [3] after the prompt [9 1 7 8], which
        ends with the answer [7 8] to the first turn. Then the result is [1 2 7 8 3].
        """
        if self.episode is None or len(self.episode.branches) < 2:
            return self.token_ids
        observed = {turn.end: turn.observed for turn in self.episode.turns}
        ids: list[int] = []
        for branch in self.episode.branches:
            answered = observed.get(branch.start, 0)  # no turn ends where the first branch begins
            ids += branch.prompt[len(branch.prompt) - answered :]
            ids += self.token_ids[branch.start : branch.end].tolist()
        return np.asarray(ids, np.int32)


def routing_dtype(experts: int) -> np.dtype:
    """Return the smallest integer dtype for the indices of ``experts`` experts; its largest value stands for "none"."""
    return np.dtype(np.uint8 if experts <= np.iinfo(np.uint8).max else np.uint16)


@dataclass(frozen=True)
class Rollout:
    """B completions of a PromptBatch, row ``p * G + g``, with the costs of sampling them."""

    batch: PromptBatch
    group_size: int
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics, by name, of the engines of the host that has the first replica."""
    scoring_hosts: tuple[int, ...] = ()
    """For each prompt, the host that scores its completions; if empty, the hosts take turns, prompt by prompt."""

    @property
    def row_prompts(self) -> tuple[Prompt, ...]:
        """The prompt of each of the B rows."""
        return tuple(p for p in self.batch.prompts for _ in range(self.group_size))

    @property
    def mean_tokens(self) -> tuple[float, ...]:
        """The mean number of sampled tokens of each prompt's completions."""
        lengths = [c.sampled_tokens for c in self.completions]
        starts = range(0, len(lengths), self.group_size)
        return tuple(sum(lengths[start : start + self.group_size]) / self.group_size for start in starts)

    @property
    def total_tokens(self) -> int:
        """The number of sampled tokens of all rows."""
        return sum(c.sampled_tokens for c in self.completions)

    def rows_of(self, prompts: Sequence[int]) -> list[int]:
        """Return the indices of the rows that belong to the prompts with these indices in the batch."""
        return [p * self.group_size + g for p in prompts for g in range(self.group_size)]

    def select(self, prompts: Sequence[int]) -> "Rollout":
        """Return the groups of some prompts, in this order; ``seconds`` and ``figures`` remain those of all groups."""
        rows = self.rows_of(prompts)
        return replace(
            self,
            batch=self.batch.select(prompts),
            completions=tuple(self.completions[row] for row in rows),
            texts=tuple(self.texts[row] for row in rows),
            scoring_hosts=tuple(self.scoring_hosts[prompt] for prompt in prompts) if self.scoring_hosts else (),
        )


@dataclass(frozen=True)
class Figure:
    """A metric of a stage, which is merged over hosts: by sum, by mean weighted by ``count``, or by maximum."""

    value: int | float
    merge: Literal["sum", "mean", "max"]
    count: int = 1
    """The number of values over which a mean was taken."""

    def merged(self, other: "Figure") -> "Figure":
        """Merge two figures: a mean of 2 over 1 value and one of 5 over 2 values make a mean of 4 over 3."""
        count = self.count + other.count
        match self.merge:
            case "sum":
                return Figure(self.value + other.value, "sum", count)
            case "max":
                return Figure(max(self.value, other.value), "max", count)
            case "mean":
                return Figure((self.value * self.count + other.value * other.count) / count, "mean", count)


@dataclass(frozen=True)
class Scores:
    """Rewards of a Rollout's B rows."""

    total: Float[np.ndarray, " B"]
    """The weighted sum (float64) of the rewards that apply to the row, without token rewards; NaN for an unscored row,
    to which no completion reward with a weight other than 0 applies."""
    by_name: Mapping[str, Float[np.ndarray, " B"]]
    """Each reward before weighting (float64); NaN where it does not apply. A token reward is summed over the row's
    tokens."""
    seconds: float
    """The seconds that scoring took after the rollout."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Metrics: the costs of the rewards, and the values that they logged, by name."""
    per_token: tuple[Float[np.ndarray, "_"], ...] = ()
    """The weighted sum of the token rewards at each token of each row, which the learner adds to the token's advantage;
    empty without token rewards."""
    token_rewards: tuple[str, ...] = ()
    """The names of the token rewards (rewards per token)."""

    @property
    def has_rewards(self) -> bool:
        """Whether there are rewards; with teachers, there may be none."""
        return bool(self.by_name)

    @property
    def scored(self) -> Bool[np.ndarray, " B"]:
        """A mask of the rows that have a total."""
        return ~np.isnan(self.total)

    def select(self, rows: Sequence[int]) -> "Scores":
        """Return the scores of some rows; ``seconds`` and ``figures`` remain those of all rows."""
        kept = list(rows)
        per_token = tuple(self.per_token[row] for row in kept) if self.per_token else ()
        by_name = {name: values[kept] for name, values in self.by_name.items()}
        return replace(self, total=self.total[kept], by_name=by_name, per_token=per_token)


def differ(rewards: Float[np.ndarray, "*groups G"]) -> Bool[np.ndarray, "*groups"]:
    """Mark the groups whose rewards differ in float32; NaN, for a reward that does not apply, is ignored."""
    known = ~np.isnan(rewards)
    highest = np.where(known, rewards, -np.inf).max(axis=-1)
    return highest.astype(np.float32) > np.where(known, rewards, np.inf).min(axis=-1).astype(np.float32)


@dataclass(frozen=True)
class ScoredRollout:
    """A Rollout with its Scores, from which the learner learns."""

    rollout: Rollout
    scores: Scores

    def mean_rewards(self) -> tuple[float, ...]:
        """Return, for each prompt, the mean total reward of its completions; NaN if no completion has one."""
        means_P = np.ma.masked_invalid(self.scores.total.reshape(-1, self.rollout.group_size)).mean(axis=1)
        return tuple(np.ma.filled(means_P, np.nan).tolist())

    def select(self, prompts: Sequence[int]) -> "ScoredRollout":
        """Return the groups of some of the prompts, by their indices in the batch."""
        return ScoredRollout(self.rollout.select(prompts), self.scores.select(self.rollout.rows_of(prompts)))


class Histogram(NamedTuple):
    """Counts of an array's elements in 64 intervals of equal width, from the smallest to the largest element."""

    edges: Float[np.ndarray, " 65"]
    """The bounds of the intervals; each includes its lower bound, and the last one also its upper bound."""
    counts: Int[np.ndarray, " 64"]
    total: Float[np.ndarray, ""]
    """The sum of the elements."""
    squares: Float[np.ndarray, ""]
    """The sum of the elements' squares."""


@dataclass(frozen=True)
class UpdateResult:
    """The results of one step of the learner."""

    metrics: Mapping[str, float]
    """The metrics ``update/*`` and ``agreement/*``."""
    advantages: Float[np.ndarray, " B"]
    seconds: float
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """The histograms ``gradients/<parameter>`` and ``parameters/<parameter>``, in steps that log them."""


@dataclass(frozen=True)
class SyncResult:
    """The costs of copying the parameters to the sampler."""

    seconds: float
    bytes_moved: int
