"""VESPO, Variational Sequence-Level Soft Policy Optimization (arXiv 2602.10693), section 3.4.

In place of a clip, the log-probabilities of a completion are multiplied by a smooth weight of its ratio s, the product
of its tokens' ratios within 1e-8 and exp(20). The loss of a token, averaged over all tokens of a step, is

    - stop_gradient(s^k exp(c (1 - s))) A log policy,   k, c = 2, 3 where A >= 0, and 3, 2 elsewhere

The options k_positive, lambda_positive, k_negative and lambda_negative set k and c. Advantages are GRPO's.
"""

import jax
import jax.numpy as jnp

from tpu_grpo.algorithms.algorithm import LOG_RATIO_LIMIT, PerToken, Sequences, TokenLosses
from tpu_grpo.algorithms.grpo import Grpo
from tpu_grpo.config import LossAggregation
from tpu_grpo.records.errors import ConfigError


class Vespo:
    """Weights log-probabilities with a gamma function of the completion's ratio."""

    aggregation: LossAggregation = "token-mean"
    numbers = ("_k", "_c")
    advantage_formula = Grpo.advantage_formula
    advantages = Grpo.advantages

    def __init__(
        self, k_positive: float = 2, lambda_positive: float = 3, k_negative: float = 3, lambda_negative: float = 2
    ):
        if (lowest := min(k_positive, lambda_positive, k_negative, lambda_negative)) <= 0:
            raise ConfigError(f"algorithm.options of vespo must be > 0, got {lowest:g}; the paper's are 2, 3, 3 and 2")
        self._k, self._c = (k_positive, k_negative), (lambda_positive, lambda_negative)

    @property
    def formula(self) -> str:
        """The formula of a token's loss, with the numbers of the weight."""
        k, c = (f"{positive:g} if A >= 0 else {negative:g}" for positive, negative in (self._k, self._c))
        return f"-sg(u)*A*log(p); u = s**k*exp(c*(1 - s)); s = min(max(prod_t(r), 1e-8), exp(20)); k = {k}; c = {c}"

    def token_losses(
        self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken, sequences: Sequences
    ) -> TokenLosses:
        """Return minus weight times advantage times log-probability."""
        limited_BT = jnp.clip(logprobs_BT - old_logprobs_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_ratio_BT = jnp.clip(sequences.sum(limited_BT), jnp.log(1e-8), LOG_RATIO_LIMIT)
        k_BT, c_BT = (jnp.where(advantages_BT >= 0.0, *of_signs) for of_signs in (self._k, self._c))
        weight_BT = jax.lax.stop_gradient(jnp.exp(k_BT * log_ratio_BT + c_BT * (1.0 - jnp.exp(log_ratio_BT))))
        return TokenLosses(-weight_BT * advantages_BT * logprobs_BT, jnp.zeros_like(logprobs_BT, bool))
