"""On-policy distillation: the reverse KL divergence to a teacher, on the policy's own tokens."""

import numpy as np
from jaxtyping import Float

from tpu_grpo.algorithms.grpo import Grpo
from tpu_grpo.config import LossAggregation


class Distill(Grpo):
    """The teacher's log-probability minus the policy's as the advantage of each token, in GRPO's clipped surrogate.

    On-policy distillation (Agarwal et al. 2023, "On-Policy Distillation of Language Models", arXiv 2306.13649; Lu et
    al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation). The divergence of a token's distributions is

        KL(policy || teacher) = E_{x ~ policy} [log policy(x) - log teacher(x)]

    Its gradient is E[(log policy - log teacher) grad log policy], because the gradient of log policy itself has the
    mean 0. So a policy gradient with the advantage

        A_t = sum over teachers of weight x (log teacher(o_t) - log policy(o_t))

    minimizes the divergence, without a baseline and from a single completion. No gradient flows through A_t. The policy
    in A_t is the current one, from the update's own forward pass: where an older policy has sampled the token, the
    ratio times A_t still has the gradient of the current policy's divergence (until the clip acts). Like the two
    sources, this is the divergence token by token: a token is not blamed for the distance of later tokens.

    tpu_grpo/learner/loss.py adds A_t to the advantages of any algorithm, if the run has teachers. Here rewards have no
    advantage: they are measured only. All tokens count alike (the aggregation token-mean).
    """

    aggregation: LossAggregation = "token-mean"
    advantage_formula = "0"

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Return zeros, whatever the rewards are."""
        return np.zeros(rewards_PG.shape)
