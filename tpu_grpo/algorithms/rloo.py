"""RLOO, REINFORCE Leave-One-Out (Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740), section 3.2.

The baseline of a completion is the mean reward of the other G - 1 completions of its prompt:

    A_i = r_i - sum_{j != i} r_j / (G - 1)

The paper treats a whole completion as one action, whose gradient is A_i times the gradient of the sum of its tokens'
log-probabilities. The aggregation sequence-mean-token-scale is that sum, divided by the constant
``rollout.max_new_tokens``.

What departs from the paper: REINFORCE has no ratio and no clip. Here each token's log-probability is replaced by the
clipped ratio to the old policy, as in PPO. At ratio 1 (the first update on a rollout, if engine and trainer agree) the
gradient is the paper's; the clip only acts when a rollout is used again, or was sampled by an older policy.
"""

import numpy as np
from jaxtyping import Float

from tpu_grpo.algorithms.grpo import Grpo
from tpu_grpo.config import LossAggregation


class Rloo(Grpo):
    """Advantages relative to the mean of the others; the clipped surrogate is inherited from GRPO."""

    aggregation: LossAggregation = "sequence-mean-token-scale"
    advantage_formula = "R - mean_others(R)"

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Subtract the mean of the others: for [1, 2, 6] the means are [4, 3.5, 1.5], the result [-3, -1.5, 4.5]."""
        others_PG = (rewards_PG.sum(axis=1, keepdims=True) - rewards_PG) / (rewards_PG.shape[1] - 1)
        return rewards_PG - others_PG
