"""Dr. GRPO, GRPO Done Right (Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv 2503.20783), section 3.

GRPO's division by the group's standard deviation favours prompts that are very easy or very hard, and its division by a
completion's length favours short right and long wrong completions. Dr. GRPO leaves both out: the advantage is

    A_i = r_i - mean(r)

and the token terms min(ratio_it A_i, clip(ratio_it, 1 - clip_low, 1 + clip_high) A_i) of a completion are summed and
divided by a constant, here ``rollout.max_new_tokens`` (the aggregation sequence-mean-token-scale). The clipped ratio is
GRPO's.
"""

import numpy as np
from jaxtyping import Float

from tpu_grpo.algorithms.grpo import Grpo
from tpu_grpo.config import LossAggregation


class DrGrpo(Grpo):
    """Advantages that are only centred; the clipped surrogate is inherited from GRPO."""

    aggregation: LossAggregation = "sequence-mean-token-scale"
    advantage_formula = "R - mean_g(R)"

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Subtract the mean of each group: [1, 2, 6] becomes [-2, -1, 3]."""
        return rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
