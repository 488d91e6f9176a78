"""The requests to an engine, with their keys, and the completions that it returns.

Array suffixes are explained in stages.py, which also exports these records.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float32, Int32, Integer

from tpu_grpo.records.episode import Episode

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of a request: temperature first, then top-k, then top-p, then min-p.

    Filters at their neutral values (``top_k=0``, ``top_p=1``, ``min_p=0``) do nothing. ``temperature=0`` is greedy.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    ignore_stop: bool = False
    """Go on past stop tokens, up to ``max_new_tokens``: for benchmarks."""


@dataclass(frozen=True)
class AnswerMode:
    """A way to answer prompts in an evaluation."""

    temperature: float
    """0 is greedy."""
    samples: int = 1
    """The number of completions of each prompt."""


@dataclass(frozen=True)
class SampleKey:
    """The key of a completion. A sampled token depends only on key, position in the sequence and logits."""

    seed: int
    step: int
    prompt: int
    sample: int


@dataclass(frozen=True)
class Request:
    """One completion to generate. Requests of one group (the same prompt) share its prefill."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    key: SampleKey
    return_experts: bool = False
    """Return the experts that the engine used. The model must have experts, and the engine must be built for this."""


@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request."""

    token_ids: Int32[np.ndarray, " T"]
    """The tokens after the prompt, including a final stop token."""
    logprobs: Float32[np.ndarray, " T"]
    """The log-probability of each token under the full distribution at the temperature (at 1 when greedy). With
    ``algorithm.filtered_ratio``, the distribution is that over the tokens that top-k, top-p and min-p keep."""
    finish_reason: FinishReason
    cached_tokens: int
    """The number of prompt tokens whose keys and values were found in the prefix cache."""
    experts: Integer[np.ndarray, "S layers k"] | None = None
    """The experts that the engine used, if the request asked for them. The S tokens are those that the engine computed:
    the prompt and all sampled tokens but the last. The dtype is `routing_dtype`'s."""
    kept: Integer[np.ndarray, " T"] | None = None
    """How many candidates top-k, top-p and min-p kept for each token, with ``algorithm.filtered_ratio``."""
    sampled: Bool[np.ndarray, " T"] | None = None
    """A mask of the tokens that the policy sampled; None if it sampled all. The others are answers of an environment,
    and have log-probability 0."""
    episode: Episode | None = None
    """The conversation with an environment that these tokens belong to."""

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self.token_ids) if self.sampled is None else int(self.sampled.sum())

    @property
    def said_ids(self) -> np.ndarray:
        """int32: all tokens after the prompt, including the answers at the end of a later branch's prompt.

        For example, the first branch has the tokens [1 2], and the second has [3] after the prompt [9 1 7 8], which
        ends with the answer [7 8] to the first turn. Then this is [1 2 7 8 3].
        """
        if self.episode is None or len(self.episode.branches) < 2:
            return self.token_ids
        observed = {turn.end: turn.observed for turn in self.episode.turns}
        said: list[int] = []
        for branch in self.episode.branches:
            answered = observed.get(branch.start, 0)  # no turn ends where the first branch begins
            said += branch.prompt[len(branch.prompt) - answered :]
            said += self.token_ids[branch.start : branch.end].tolist()
        return np.asarray(said, np.int32)


def routing_dtype(experts: int) -> np.dtype:
    """Return the smallest integer dtype for expert numbers below ``experts``; its largest value is kept for "none"."""
    return np.dtype(np.uint8 if experts <= np.iinfo(np.uint8).max else np.uint16)
