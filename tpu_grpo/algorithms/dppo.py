"""DPPO, Divergence PPO (Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879).

A ratio says little about how far the policy has moved: that of an unlikely token may double while the distribution
hardly changes. DPPO uses the difference of the probabilities, which is the total variation over the two outcomes "this
token" and "another token" (Binary-TV). With the policy's probability p and the sampling policy's q, a token's loss is

    - ratio A + kl_weight log(ratio)^2,   ratio = p / q

The first term is dropped where the probability has moved too far in the direction that A gives it: where A > 0 and
p - q > mask_high, or A < 0 and q - p > mask_low. The ratio itself is not clipped. The default bounds of 0.2 and
kl_weight of 1e-3 are prime-rl's; the paper has no second term (kl_weight = 0).

The paper compares with the probabilities of sampling, and finds that those recomputed by the trainer do harm. Therefore
algorithm.old_policy must be rollout. Advantages are centred (Dr. GRPO's), and all tokens of a step count alike, as in
prime-rl.
"""

import jax
import jax.numpy as jnp

from tpu_grpo.algorithms.algorithm import PerToken, TokenLosses, limited_exp
from tpu_grpo.algorithms.grpo import DrGrpo
from tpu_grpo.config import LossAggregation
from tpu_grpo.records.errors import ConfigError


class Dppo:
    """Drops tokens whose probability has moved too far in the direction of their advantage."""

    aggregation: LossAggregation = "token-mean"
    numbers = ("_low", "_high", "_kl_weight")
    advantage_formula = DrGrpo.advantage_formula
    advantages = DrGrpo.advantages

    def __init__(
        self, old_policy: str = "rollout", mask_low: float = 0.2, mask_high: float = 0.2, kl_weight: float = 1e-3
    ):
        if old_policy != "rollout":
            raise ConfigError(
                f"algorithm.name=dppo needs algorithm.old_policy=rollout, got {old_policy}; it compares probabilities "
                "with those that were sampled from: leave old_policy out"
            )
        for option, value in (("mask_low", mask_low), ("mask_high", mask_high)):
            if not 0.0 < value <= 1.0:
                raise ConfigError(
                    f"algorithm.options.{option} must be a difference of probabilities in (0, 1], got {value}; try 0.2"
                )
        if kl_weight < 0.0:
            raise ConfigError(f"algorithm.options.kl_weight must be >= 0, got {kl_weight}; try 0.001")
        self._low, self._high, self._kl_weight = mask_low, mask_high, kl_weight

    @property
    def formula(self) -> str:
        """The formula of a token's loss, with the bounds of the difference."""
        far = f"p - p_engine > {self._high:g} if A > 0 else p_engine - p > {self._low:g}"
        penalty = f" + {self._kl_weight:g}*log(r)**2" if self._kl_weight else ""
        return f"(0 if far else -r*A){penalty}; far = {far}"

    def token_losses(self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken) -> TokenLosses:
        """Return minus ratio times advantage for tokens that are not dropped, plus the penalty for all tokens."""
        log_ratio_BT = logprobs_BT - old_logprobs_BT
        moved_BT = jax.lax.stop_gradient(jnp.exp(logprobs_BT) - jnp.exp(old_logprobs_BT))
        dropped_BT = jnp.where(advantages_BT > 0.0, moved_BT > self._high, moved_BT < -self._low)
        dropped_BT &= advantages_BT != 0.0
        policy_BT = jnp.where(dropped_BT, 0.0, -advantages_BT * limited_exp(log_ratio_BT))
        return TokenLosses(policy_BT + self._kl_weight * jnp.square(log_ratio_BT), dropped_BT)
