"""The interface of algorithms. An algorithm turns rewards into advantages, and log-probabilities into token losses.

    algorithm = Grpo(clip_low=0.2, clip_high=0.2)
    advantages_PG = algorithm.advantages(rewards_PG)                                       # on the host, once per step
    losses = algorithm.token_losses(logprobs_BT, old_logprobs_BT, advantages_BT)           # inside the train step

Suffixes: P prompts, G completions of each, B training rows of packed completions, T tokens of a row, N rewards of the
config.

tpu_grpo/learner/loss.py applies what all algorithms share: truncated importance weights, the mean over tokens and rows,
and the KL penalty.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tpu_grpo.config import LossAggregation

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clipped to plus or minus this before exp, which overflows float32 above 88."""
ON_REQUEST: Mapping[str, tuple[str, ...]] = {
    "advantages": ("lengths_PG", "rewards_NPG", "weights_N"),
    "token_losses": ("sequences", "taught"),
}
"""Keyword arguments that a method gets only if it has parameters for them.

lengths_PG: the number of sampled tokens of each completion. rewards_NPG: each reward of the config before weighting,
NaN where it does not apply. weights_N: the weights of the rewards at this step. sequences: see `Sequences`. taught: see
`Taught`; only for an objective with an attribute ``top_k``.
"""

PerToken = Float[Array, "B T"]
"""A number for each token of the training rows, float32."""


class TokenLosses(NamedTuple):
    """The loss and the clip mask of every token; positions beyond a completion's end are masked out later."""

    loss_BT: PerToken
    """The loss of each token, which training minimizes."""
    clipped_BT: Bool[Array, "B T"]
    """Whether clipping changed the loss; ``update/clip_fraction`` is the mean of this mask."""


@dataclass(frozen=True)
class Sequences:
    """Sums and means over the tokens of each completion in a training row, for objectives over whole completions.

    For example, if a row holds two sequences, [[1 3 5 | 2 4]], and every token but the row's first counts, the sums are
    [[8 8 8 | 6 6]], and the means [[4 4 4 | 3 3]]. The tokens of a sequence are contiguous. A conversation is one
    sequence, or several if the chat template changed earlier turns. An environment's tokens do not count.

    A sum takes 2 log2 T additions of shifted rows, whatever the sequence lengths, and moves no data between devices.
    """

    segments_BT: Int[Array, "B T"]
    """The number of each token's sequence within its row."""
    counts_BT: Bool[Array, "B T"]
    """Whether the token counts in the loss."""

    def sum(self, values_BT: PerToken) -> PerToken:
        """Return, at each token, the sum over the counted tokens of its sequence; all its tokens get the same bits."""
        so_far_BT = self._added_up(jnp.where(self.counts_BT, values_BT, 0.0), to_right=True)
        next_BT = jnp.pad(self.segments_BT[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return self._added_up(jnp.where(self.segments_BT != next_BT, so_far_BT, 0.0), to_right=False)

    def mean(self, values_BT: PerToken) -> PerToken:
        """Return, at each token, the mean over the counted tokens of its sequence; 0 if none counts."""
        return self.sum(values_BT) / jnp.maximum(self.sum(jnp.ones_like(values_BT)), 1.0)

    def _added_up(self, values_BT: PerToken, *, to_right: bool) -> PerToken:
        """Return, at each token, the sum of its sequence's values from the first token to this one, or from this one
        to the last if not ``to_right``. The rows are shifted by 1, 2, 4 ... tokens and added.

        With a cumulative sum of the row, a sequence's sum would be an inexact difference of two large numbers.
        """
        distance = 1
        while distance < values_BT.shape[1]:
            same_BT = self.segments_BT[:, distance:] == self.segments_BT[:, :-distance]
            left_BT, right_BT = values_BT[:, :-distance], values_BT[:, distance:]
            added_BT = jnp.where(same_BT, left_BT if to_right else right_BT, 0.0)
            values_BT += jnp.pad(added_BT, ((0, 0), (distance, 0) if to_right else (0, distance)))
            distance *= 2
        return values_BT


@dataclass(frozen=True)
class Taught:
    """Log-probabilities of the K tokens that are likeliest to each of N teachers, in every token's place."""

    teacher_BTNL: Float[Array, "B T N L"]
    """The teacher's log-probabilities of L = K + 1 bins, these tokens and all others together, without gradient."""
    policy_BTNK: Float[Array, "B T N K"]
    """The policy's log-probabilities of the same tokens, through which the gradient flows."""
    weights_BTN: Float[Array, "B T N"]
    """The weights of the teachers; 0 where a teacher does not teach."""
    has_rest: bool
    """Whether the vocabulary has more than these K tokens."""


class Algorithm(Protocol):
    """The methods that a class needs to be an algorithm. They are called with keyword arguments.

    The constructor gets group_size, iterations, clip_low and clip_high if it has parameters of these names, dual_clip
    and delta if they are set, and all of ``algorithm.options``. A method also gets the arguments of `ON_REQUEST` that
    it has parameters for. Three attributes are optional: ``formula`` and ``advantage_formula`` describe the objective
    to people (see formula.py), and ``numbers`` names the attributes that the compiled program takes as inputs.
    """

    @property
    def aggregation(self) -> LossAggregation:
        """How token losses are averaged if ``algorithm.loss_aggregation`` is not set; may be a class attribute."""
        ...

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Compute how much better each completion is than the others of its prompt; float64 in and out."""
        ...

    def token_losses(self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken) -> TokenLosses:
        """Compute the loss of every token; float32 in and out, traced by jax.

        Args:
            logprobs_BT: the policy's log-probabilities, through which the gradient flows.
            old_logprobs_BT: the old policy's log-probabilities, see ``algorithm.old_policy``.
            advantages_BT: the advantage of each token. It is the same for all tokens of a completion, unless single
                tokens have rewards.
        """
        ...


def token_ratio(logprobs_BT: PerToken, old_logprobs_BT: PerToken) -> PerToken:
    """Compute the ratio policy / old policy of each token's probability, limited to between exp(-20) and exp(20)."""
    return limited_exp(logprobs_BT - old_logprobs_BT)


def limited_exp(log_ratio_BT: PerToken) -> PerToken:
    """Compute the exponential of a log-ratio, limited to between exp(-20) and exp(20)."""
    return jnp.exp(jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def requested(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return those argument names of `ON_REQUEST` that a method has parameters for."""
    parameters = inspect.signature(method).parameters
    return tuple(name for names in ON_REQUEST.values() for name in names if name in parameters)


def asked(method: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by name, the values in ``known`` that are arguments of `ON_REQUEST` and parameters of a method."""
    return {name: known[name] for name in requested(method) if name in known}
