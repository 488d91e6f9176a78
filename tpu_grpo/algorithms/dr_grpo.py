"""Dr. GRPO, GRPO Done Right (Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv 2503.20783), section 3.

GRPO's division by the group's standard deviation favours prompts that are very easy or very hard, and its division by a
completion's length favours short right and long wrong completions. Dr. GRPO leaves both out: the advantage is

    A_i = r_i - mean(r)

and the token terms min(ratio_it A_i, clip(ratio_it, 1 - clip_low, 1 + clip_high) A_i) of a completion are summed and
divided by a constant, here ``rollout.max_new_tokens`` (the aggregation sequence-mean-token-scale). The clipped ratio is
GRPO's.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tpu_grpo.algorithms.algorithm import TokenLosses, token_ratio
from tpu_grpo.config import LossAggregation


class DrGrpo:
    """Advantages that are only centred, and the clipped surrogate."""

    aggregation: LossAggregation = "sequence-mean-token-scale"

    def __init__(self, clip_low: float, clip_high: float):
        self._lowest, self._highest = 1 - clip_low, 1 + clip_high

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Subtract the mean of each group: [1, 2, 6] becomes [-2, -1, 3]."""
        return rewards_PG - rewards_PG.mean(axis=1, keepdims=True)

    def token_losses(
        self,
        logprobs_BT: Float[Array, "B T"],
        old_logprobs_BT: Float[Array, "B T"],
        advantages_B1: Float[Array, "B 1"],
    ) -> TokenLosses:
        """Minus the clipped surrogate, as in GRPO."""
        ratio_BT = token_ratio(logprobs_BT, old_logprobs_BT)
        plain_BT = -advantages_B1 * ratio_BT
        clipped_BT = -advantages_B1 * jnp.clip(ratio_BT, self._lowest, self._highest)
        return TokenLosses(jnp.maximum(plain_BT, clipped_BT), clipped_BT > plain_BT)
