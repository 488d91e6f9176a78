"""Generalized knowledge distillation: a divergence to the teacher over the vocabulary, on the policy's own tokens."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_grpo.algorithms.algorithm import PerToken, Taught, TokenLosses
from tpu_grpo.algorithms.distill import Distill
from tpu_grpo.config import LossAggregation
from tpu_grpo.records.errors import ConfigError

LARGEST_LOG_SUM = -1e-7
"""The log of the policy's summed probabilities is at most this, so that the rest has a logarithm."""

Bins = Float[Array, "*shape bins"]


class Gkd:
    """The generalized Jensen-Shannon divergence between teacher and policy, at every token that the policy sampled.

    GKD (Agarwal et al. 2023, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", arXiv
    2306.13649), equation 1. With P the teacher's distribution of a token, Q the policy's, and b the option mix,

        JSD_b(P || Q) = b KL(P || M) + (1 - b) KL(Q || M),   M = b P + (1 - b) Q

    Divided by b, it tends to KL(P || Q) as b tends to 0; divided by 1 - b, to KL(Q || P) as b tends to 1. As in TRL,
    mix 0 is this forward divergence, and mix 1 the reverse one. Unlike `Distill`, which knows the teacher's
    log-probability of the sampled token only, the loss is a sum over the vocabulary, and gradients flow through it
    directly: it has no ratio, no clip and no advantage.

    The vocabulary has top_k + 1 bins: the teacher's top_k likeliest tokens, and one bin for all other tokens, whose
    probability is 1 minus the others'. The divergence over bins is at most that over the whole vocabulary (the data
    processing inequality), and equal if top_k is the whole vocabulary. Rewards are measured only.
    """

    aggregation: LossAggregation = "token-mean"
    numbers = ("_mix",)
    advantage_formula = "0"
    advantages = Distill.advantages

    def __init__(self, mix: float = 0.5, top_k: int = 64):
        if not 0.0 <= mix <= 1.0:
            raise ConfigError(f"algorithm.options.mix of gkd must be between 0 and 1, got {mix}; 0.5 is symmetric")
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ConfigError(f"algorithm.options.top_k of gkd must be a whole number from 1 on, got {top_k}; try 64")
        self.top_k = top_k
        self._limit, self._mix = int(mix), None if mix in (0, 1) else float(mix)

    @property
    def formula(self) -> str:
        """The formula of a token's loss."""
        return f"sum_teachers(weight*jsd(top_{self.top_k}(p_teacher), p, {self._now:g}))"

    @property
    def _now(self) -> Any:
        """The option mix: an integer at the limits, or a number that may be traced."""
        return self._limit if self._mix is None else self._mix

    def token_losses(
        self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken, taught: Taught
    ) -> TokenLosses:
        """Return the sum over the teachers of weight times divergence; the other arguments have no part in it."""
        teacher, policy = taught.teacher_BTNL, with_rest(taught.policy_BTNK)
        if not taught.has_rest:
            teacher, policy = teacher[..., :-1], taught.policy_BTNK
        loss_BT = (taught.weights_BTN * divergence(teacher, policy, self._now)).sum(axis=-1)
        return TokenLosses(loss_BT, jnp.zeros_like(loss_BT, bool))


def with_rest(logprobs: Float[Array, "*shape K"]) -> Bins:
    """Add a bin for the rest, whose log-probability is log(1 - the sum of the others' probabilities)."""
    peak = jnp.max(logprobs, axis=-1, keepdims=True)
    log_sum = peak + jnp.log(jnp.exp(logprobs - peak).sum(axis=-1, keepdims=True))
    rest = jnp.log(-jnp.expm1(jnp.minimum(log_sum, LARGEST_LOG_SUM)))
    return jnp.concatenate([logprobs, rest], axis=-1)


def divergence(teacher: Bins, policy: Bins, mix: Any) -> Float[Array, "*shape"]:
    """Compute JSD_mix(teacher || policy) of log-probabilities over the last axis; with the integers 0 and 1 for
    ``mix``, the KL divergences at its limits, see `Gkd`."""
    if isinstance(mix, int):
        return _kl(policy, teacher) if mix else _kl(teacher, policy)
    mixed = jnp.logaddexp(teacher + jnp.log(mix), policy + jnp.log1p(-mix))
    return mix * _kl(teacher, mixed) + (1.0 - mix) * _kl(policy, mixed)


def _kl(of: Bins, to: Bins) -> Float[Array, "*shape"]:
    return (jnp.exp(of) * (of - to)).sum(axis=-1)
