"""What an algorithm is: it turns rewards into advantages, and log-probabilities into the loss of every token.

    algorithm = Grpo(clip_low=0.2, clip_high=0.2)
    advantages_PG = algorithm.advantages(rewards_PG)                                       # on the host, once per step
    losses = algorithm.token_losses(logprobs_BT, old_logprobs_BT, advantages_BT)           # inside the train step

Suffixes: P prompts, G completions of each; B training rows, into which completions are packed, T tokens of a row.

What all algorithms have in common is done around them by learner/loss.py: truncated importance weights, the mean over
tokens and rows, the KL penalty.
"""

from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from tpu_grpo.config import LossAggregation

LOG_RATIO_LIMIT = 20.0
"""Differences of log-probabilities are cut to this before exp, which overflows float32 beyond 88."""


class TokenLosses(NamedTuple):
    """What an algorithm says of every token; positions beyond a completion's end are masked out later."""

    loss_BT: Float[Array, "B T"]
    """The loss: a gradient step makes it smaller."""
    clipped_BT: Bool[Array, "B T"]
    """Whether clipping changed the loss; ``update/clip_fraction`` is the mean of it."""


class Algorithm(Protocol):
    """The methods that a class needs to be an algorithm. They are called with their arguments by name.

    The constructor gets, by name, whichever of group_size, iterations, clip_low and clip_high it has parameters for,
    and the options of the config.
    """

    @property
    def aggregation(self) -> LossAggregation:
        """How the token losses become one number unless ``algorithm.loss_aggregation`` is set; an attribute will do."""
        ...

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """How much better each completion is than the others of its prompt; float64 in and out."""
        ...

    def token_losses(
        self,
        logprobs_BT: Float[Array, "B T"],
        old_logprobs_BT: Float[Array, "B T"],
        advantages_BT: Float[Array, "B T"],
    ) -> TokenLosses:
        """Compute the loss of every token; float32 in and out, traced by jax.

        Args:
            logprobs_BT: the policy's, through which the gradient flows.
            old_logprobs_BT: those of the policy that sampled, as ``algorithm.old_policy`` says.
            advantages_BT: the advantage of each token, which all tokens of a completion share.
        """
        ...


def token_ratio(logprobs_BT: Float[Array, "B T"], old_logprobs_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """The ratio of the policy's to the old policy's probability of every token, between exp(-20) and exp(20)."""
    return jnp.exp(jnp.clip(logprobs_BT - old_logprobs_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
