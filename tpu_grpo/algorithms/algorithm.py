"""The interface of an algorithm: it turns rewards into advantages, and log-probabilities into the loss of every
token.

    algorithm = Grpo(clip_low=0.2, clip_high=0.2)
    advantages_PG = algorithm.advantages(rewards_PG)                                       # on the host, once per step
    losses = algorithm.token_losses(logprobs_BT, old_logprobs_BT, advantages_BT)           # inside the train step

Suffixes: P prompts, G completions of each; B training rows, into which completions are packed, T tokens of a row;
N rewards of the config.

learner/loss.py does what all algorithms have in common: truncated importance weights, the mean over tokens and rows,
the KL penalty.
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
"""Differences of log-probabilities are cut to this before exp, which overflows float32 beyond 88."""
ON_REQUEST: Mapping[str, tuple[str, ...]] = {
    "advantages": ("lengths_PG", "rewards_NPG", "weights_N"),
    "token_losses": ("sequences",),
}
"""What a method also gets, by name, if it has a parameter of that name.

lengths_PG: the sampled tokens of each completion. rewards_NPG: the rewards of the config one by one, before weighting,
NaN where one does not apply. weights_N: their weights at this step. sequences: see `Sequences`.
"""

PerToken = Float[Array, "B T"]
"""A number for each token of the training rows, float32."""


class TokenLosses(NamedTuple):
    """The losses of tokens and the mask of clipped ones; positions beyond a completion's end are masked out later."""

    loss_BT: PerToken
    """The loss: a gradient step makes it smaller."""
    clipped_BT: Bool[Array, "B T"]
    """Whether clipping changed the loss; ``update/clip_fraction`` is the mean of it."""


@dataclass(frozen=True)
class Sequences:
    """Says which tokens of a training row belong to the same completion, for objectives over whole completions.

    Values [[1 3 5 | 2 4]] of two sequences in a row, of which all tokens count but the first, have the sums
    [[8 8 8 | 6 6]] and the means [[4 4 4 | 3 3]]. The program is the same for all lengths; it takes 2 log2 T steps over
    the row, and moves nothing between devices. The tokens of a sequence lie side by side. A conversation is a sequence,
    whose answers of the environment do not count; where the chat template changed its past, it is several.
    """

    segments_BT: Int[Array, "B T"]
    """The number of each token's sequence in its row."""
    counts_BT: Bool[Array, "B T"]
    """Whether the token counts in the loss."""

    def sum(self, values_BT: PerToken) -> PerToken:
        """Give every token the sum over the counted tokens of its sequence: to all of them exactly the same number."""
        so_far_BT = self._added_up(jnp.where(self.counts_BT, values_BT, 0.0), to_right=True)
        next_BT = jnp.pad(self.segments_BT[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return self._added_up(jnp.where(self.segments_BT != next_BT, so_far_BT, 0.0), to_right=False)

    def mean(self, values_BT: PerToken) -> PerToken:
        """Give every token the mean over the counted tokens of its sequence; 0 if none counts."""
        return self.sum(values_BT) / jnp.maximum(self.sum(jnp.ones_like(values_BT)), 1.0)

    def _added_up(self, values_BT: PerToken, *, to_right: bool) -> PerToken:
        """Add to each token those of its sequence on one side: over distances 1, 2, 4 ... a sum covers twice as many.

        Two tokens of one sequence have no other sequence between them. A cumulative sum of the row would do the same
        with fewer steps, but a sequence's sum would be the difference of two large numbers.
        """
        distance = 1
        while distance < values_BT.shape[1]:
            same_BT = self.segments_BT[:, distance:] == self.segments_BT[:, :-distance]
            left_BT, right_BT = values_BT[:, :-distance], values_BT[:, distance:]
            added_BT = jnp.where(same_BT, left_BT if to_right else right_BT, 0.0)
            values_BT += jnp.pad(added_BT, ((0, 0), (distance, 0) if to_right else (0, distance)))
            distance *= 2
        return values_BT


class Algorithm(Protocol):
    """The methods that a class needs to be an algorithm. They are called with their arguments by name.

    The constructor gets, by name, whichever of group_size, iterations, clip_low and clip_high it has parameters for,
    of dual_clip and delta those that are set, and the options of the config. The methods get what they ask for of
    `ON_REQUEST`. The attributes ``formula`` and ``advantage_formula`` are for people, see formula.py. Those of its
    attributes that the attribute ``numbers`` names are handed to the compiled program as data.
    """

    @property
    def aggregation(self) -> LossAggregation:
        """How token losses are averaged unless ``algorithm.loss_aggregation`` is set; a class attribute is enough."""
        ...

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """How much better each completion is than the others of its prompt; float64 in and out."""
        ...

    def token_losses(self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken) -> TokenLosses:
        """Compute the loss of every token; float32 in and out, traced by jax.

        Args:
            logprobs_BT: the policy's, through which the gradient flows.
            old_logprobs_BT: those of the policy that sampled, as ``algorithm.old_policy`` says.
            advantages_BT: the advantage of each token, which all tokens of a completion share unless a reward of single
                tokens adds to it.
        """
        ...


def token_ratio(logprobs_BT: PerToken, old_logprobs_BT: PerToken) -> PerToken:
    """The ratio of the policy's to the old policy's probability of every token, between exp(-20) and exp(20)."""
    return limited_exp(logprobs_BT - old_logprobs_BT)


def limited_exp(log_ratio_BT: PerToken) -> PerToken:
    """The exponential of a log-ratio, limited to between exp(-20) and exp(20)."""
    return jnp.exp(jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def requested(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of `ON_REQUEST` among a method's parameters."""
    parameters = inspect.signature(method).parameters
    return tuple(name for names in ON_REQUEST.values() for name in names if name in parameters)


def asked(method: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the known values that a method has parameters for."""
    return {name: known[name] for name in requested(method) if name in known}
