"""SAPO, Soft Adaptive Policy Optimization (Gao et al. 2025, arXiv 2511.20347).

In place of a clip, a sigmoid smoothly reduces the gradient as the ratio moves away from 1. The loss of a token is

    - (4 / t) sigmoid(t (ratio - 1)) A,   t = 1.0 where A > 0, and 1.05 elsewhere

Its gradient is that of - ratio A, times the factor 4 s (1 - s), where s is the sigmoid. This factor is 1 at ratio 1,
and falls on both sides. It falls faster for negative advantages, because lowering one token's probability raises those
of many unrelated tokens. Advantages are GRPO's, and completions count alike, whatever their length. The options
temperature_positive and temperature_negative set the two values of t. Nothing is clipped: ``update/clip_fraction`` is
0.
"""

import jax
import jax.numpy as jnp

from tpu_grpo.algorithms.algorithm import PerToken, TokenLosses, token_ratio
from tpu_grpo.algorithms.grpo import Grpo
from tpu_grpo.config import LossAggregation
from tpu_grpo.records.errors import ConfigError


class Sapo:
    """Passes the ratio through a sigmoid, whose temperature depends on the advantage's sign."""

    aggregation: LossAggregation = "sequence-mean-token-mean"
    numbers = ("_positive", "_negative")
    advantage_formula = Grpo.advantage_formula
    advantages = Grpo.advantages

    def __init__(self, temperature_positive: float = 1.0, temperature_negative: float = 1.05):
        for option, value in (
            ("temperature_positive", temperature_positive),
            ("temperature_negative", temperature_negative),
        ):
            if value <= 0.0:
                raise ConfigError(f"algorithm.options.{option} must be > 0, got {value}; the paper's are 1.0 and 1.05")
        self._positive, self._negative = temperature_positive, temperature_negative

    @property
    def formula(self) -> str:
        """The formula of a token's loss, with the temperatures."""
        return f"-4/t*sigmoid(t*(r - 1))*A; t = {self._positive:g} if A > 0 else {self._negative:g}"

    def token_losses(self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken) -> TokenLosses:
        """Return minus the scaled sigmoid of the ratio times the advantage."""
        ratio_BT = token_ratio(logprobs_BT, old_logprobs_BT)
        temperature_BT = jnp.where(advantages_BT > 0.0, self._positive, self._negative)
        gate_BT = 4.0 / temperature_BT * jax.nn.sigmoid(temperature_BT * (ratio_BT - 1.0))
        return TokenLosses(-gate_BT * advantages_BT, jnp.zeros_like(ratio_BT, bool))
