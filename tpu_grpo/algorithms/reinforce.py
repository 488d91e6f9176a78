"""REINFORCE (Williams 1992, "Simple statistical gradient-following algorithms"), section 5, with a group's baseline.

The loss of a token is

    - A log policy

summed over a completion, which is one episode, and divided by the constant ``rollout.max_new_tokens`` (the aggregation
sequence-mean-token-scale). The advantage is the reward minus the mean of the group.

Without a ratio, the gradient is right only for samples of the current policy, so that a second update on a rollout is
refused, and so are mini-batches. With the option importance_sampling the loss is - ratio A, which has the same gradient
at ratio 1 and stays right elsewhere, but its variance is not bounded.
"""

import jax.numpy as jnp

from tpu_grpo.algorithms.algorithm import PerToken, TokenLosses, token_ratio
from tpu_grpo.algorithms.dr_grpo import DrGrpo
from tpu_grpo.config import LossAggregation
from tpu_grpo.records.errors import ConfigError


class Reinforce:
    """The plain policy gradient."""

    aggregation: LossAggregation = "sequence-mean-token-scale"
    advantage_formula = DrGrpo.advantage_formula
    advantages = DrGrpo.advantages

    def __init__(self, iterations: int = 1, mini_batch_prompts: int | None = None, importance_sampling: bool = False):
        if (iterations > 1 or mini_batch_prompts is not None) and not importance_sampling:
            needed, given = (
                ("iterations=1", iterations) if iterations > 1 else ("mini_batch_prompts=null", mini_batch_prompts)
            )
            raise ConfigError(
                f"algorithm.name=reinforce needs algorithm.{needed}, got {given}; it has no ratio that would weigh "
                "what an older policy sampled: set algorithm.options.importance_sampling=true, or take grpo or cispo"
            )
        self._importance_sampling = importance_sampling

    @property
    def formula(self) -> str:
        """The loss of a token."""
        return "-r*A" if self._importance_sampling else "-A*log(p)"

    def token_losses(self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken) -> TokenLosses:
        """Return minus advantage times log-probability, or minus advantage times ratio."""
        factor_BT = token_ratio(logprobs_BT, old_logprobs_BT) if self._importance_sampling else logprobs_BT
        return TokenLosses(-advantages_BT * factor_BT, jnp.zeros_like(logprobs_BT, bool))
