"""REINFORCE, whose baseline is the group's mean reward, and RLOO, whose baseline is the leave-one-out mean."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tpu_grpo.algorithms.algorithm import PerToken, TokenLosses, token_ratio
from tpu_grpo.algorithms.grpo import DrGrpo, Grpo, uneven
from tpu_grpo.config import LossAggregation
from tpu_grpo.records.errors import ConfigError


class Reinforce:
    """The plain policy gradient.

    REINFORCE (Williams 1992, "Simple statistical gradient-following algorithms"), section 5, with a group's baseline.

    The loss of a token is

        - A log policy

    summed over a completion, which is one episode, and divided by the constant ``rollout.max_new_tokens`` (the
    aggregation sequence-mean-token-scale). The advantage is the reward minus the mean of the group.

    Without a ratio, the gradient is right only for samples of the current policy, so that several iterations and
    mini-batches are refused. With the option importance_sampling the loss is - ratio A. Its gradient is the same at
    ratio 1, and is right at other ratios, but the gradient's variance is not bounded.
    """

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
        """The formula of a token's loss."""
        return "-r*A" if self._importance_sampling else "-A*log(p)"

    def token_losses(self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken) -> TokenLosses:
        """Return minus advantage times log-probability, or minus advantage times ratio."""
        factor_BT = token_ratio(logprobs_BT, old_logprobs_BT) if self._importance_sampling else logprobs_BT
        return TokenLosses(-advantages_BT * factor_BT, jnp.zeros_like(logprobs_BT, bool))


class Rloo(Grpo):
    """Advantages relative to the mean of the other completions; the clipped surrogate is inherited from GRPO.

    RLOO, REINFORCE Leave-One-Out (Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740), section 3.2.

    The baseline of a completion is the mean reward of the other G - 1 completions of its prompt:

        A_i = r_i - sum_{j != i} r_j / (G - 1)

    The paper treats a whole completion as one action, whose gradient is A_i times the gradient of the sum of its
    tokens' log-probabilities. The aggregation sequence-mean-token-scale is that sum, divided by the constant
    ``rollout.max_new_tokens``.

    The paper's REINFORCE has no ratio and no clip. Here each token's log-probability is replaced by the clipped ratio
    to the old policy, as in PPO. At ratio 1 (the first update on a rollout, if engine and trainer agree) the gradient
    is the paper's. The clip only acts when a rollout is used again, or was sampled by an older policy.
    """

    aggregation: LossAggregation = "sequence-mean-token-scale"
    advantage_formula = "R - mean_others(R)"

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Subtract the mean of the other completions: [1, 2, 6] - [4, 3.5, 1.5] = [-3, -1.5, 4.5]."""
        count_P1 = np.ma.count(rewards_PG, axis=1, keepdims=True)
        others_PG = (rewards_PG.sum(axis=1, keepdims=True) - rewards_PG) / np.maximum(count_P1 - 1, 1)
        return (rewards_PG - others_PG) * uneven(rewards_PG)
