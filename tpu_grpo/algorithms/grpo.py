"""GRPO, Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300), section 4.1.

For a prompt's G completions with rewards r_1 ... r_G, every token t of completion i has the advantage (section 4.1.2)

    A_i = (r_i - mean(r)) / std(r)

and the objective (equation 3, without its KL term, which learner/loss.py subtracts) is the mean over completions and
their tokens of

    min(ratio_it A_i, clip(ratio_it, 1 - clip_low, 1 + clip_high) A_i),   ratio_it = policy(o_it) / old policy(o_it)

What departs from the paper: the standard deviation divides by G - 1 and has 1e-6 added, so that a group of equal
rewards has advantages of zero; clip_high may be larger than clip_low ("clip-higher", DAPO, Yu et al. 2025, arXiv
2503.14476, equation 10), which leaves unlikely tokens more room to grow. With both at 0.2 it is the paper's.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tpu_grpo.algorithms.algorithm import TokenLosses, token_ratio
from tpu_grpo.config import LossAggregation


class Grpo:
    """Advantages in standard deviations of the group, and the clipped surrogate."""

    aggregation: LossAggregation = "sequence-mean-token-mean"

    def __init__(self, clip_low: float, clip_high: float):
        self._lowest, self._highest = 1 - clip_low, 1 + clip_high

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Standardize the rewards of each group: [1, 2, 6] has mean 3 and std sqrt(7), so [-2, -1, 3] / sqrt(7)."""
        mean_P1 = rewards_PG.mean(axis=1, keepdims=True)
        std_P1 = rewards_PG.std(axis=1, ddof=1, keepdims=True)
        return (rewards_PG - mean_P1) / (std_P1 + 1e-6)

    def token_losses(
        self,
        logprobs_BT: Float[Array, "B T"],
        old_logprobs_BT: Float[Array, "B T"],
        advantages_BT: Float[Array, "B T"],
    ) -> TokenLosses:
        """Minus the clipped surrogate; the larger of two losses is the smaller of two objectives."""
        ratio_BT = token_ratio(logprobs_BT, old_logprobs_BT)
        plain_BT = -advantages_BT * ratio_BT
        clipped_BT = -advantages_BT * jnp.clip(ratio_BT, self._lowest, self._highest)
        return TokenLosses(jnp.maximum(plain_BT, clipped_BT), clipped_BT > plain_BT)
