"""RLOO, REINFORCE Leave-One-Out (Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740), section 3.2.

The baseline of a completion is the mean reward of the other G - 1 completions of its prompt:

    A_i = r_i - sum_{j != i} r_j / (G - 1)

The paper takes a whole completion for one action, whose gradient is A_i times that of the sum of its tokens'
log-probabilities. The aggregation sequence-mean-token-scale is that sum, divided by the constant
``rollout.max_new_tokens``.

What departs from the paper: REINFORCE has no ratio and no clip. Here each token's log-probability is replaced by the
clipped ratio to the old policy, as in PPO. At ratio 1, which is where the first update on a rollout stands if engine
and trainer agree, the gradient is the paper's; the clip only acts when a rollout is used again, or was sampled by a
policy that has moved on.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tpu_grpo.algorithms.algorithm import TokenLosses, token_ratio
from tpu_grpo.config import LossAggregation


class Rloo:
    """Advantages over the mean of the others, and the clipped surrogate."""

    aggregation: LossAggregation = "sequence-mean-token-scale"

    def __init__(self, clip_low: float, clip_high: float):
        self._lowest, self._highest = 1 - clip_low, 1 + clip_high

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Subtract the mean of the others: of [1, 2, 6] these are [4, 3.5, 1.5], so [-3, -1.5, 4.5]."""
        others_PG = (rewards_PG.sum(axis=1, keepdims=True) - rewards_PG) / (rewards_PG.shape[1] - 1)
        return rewards_PG - others_PG

    def token_losses(
        self,
        logprobs_BT: Float[Array, "B T"],
        old_logprobs_BT: Float[Array, "B T"],
        advantages_B1: Float[Array, "B 1"],
    ) -> TokenLosses:
        """Minus the clipped surrogate; its gradient at ratio 1 is that of -A times the log-probability."""
        ratio_BT = token_ratio(logprobs_BT, old_logprobs_BT)
        plain_BT = -advantages_B1 * ratio_BT
        clipped_BT = -advantages_B1 * jnp.clip(ratio_BT, self._lowest, self._highest)
        return TokenLosses(jnp.maximum(plain_BT, clipped_BT), clipped_BT > plain_BT)
