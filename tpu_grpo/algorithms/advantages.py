"""Advantage estimators, which ``algorithm.advantage`` combines with the token losses of any algorithm.

Each estimator is a class with the method ``advantages`` of `Algorithm`. The estimators of GRPO, Dr. GRPO and RLOO are
in the files of these algorithms. All run on the host in float64 once per step.

Suffixes: P prompts, G completions of each, N rewards of the config. R is the total reward of a completion, and m the
mean R of its group. Standard deviations (std) divide by one less than the number of values and have 1e-6 added, so that
equal rewards give advantages of 0. If some rows are unscored, rewards and lengths are masked arrays.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from tpu_grpo.algorithms.grpo import DrGrpo, Grpo, centred, uneven
from tpu_grpo.algorithms.reinforce import Rloo
from tpu_grpo.records.errors import RewardError

STD_FLOOR = 1e-6


class LitePpo:
    """R - m, divided by the std of all rewards of the step (Liu et al. 2025, "Tricks or Traps?", arXiv 2508.08221).

    The std of a step is steadier than that of a group, and treats easy and hard prompts alike.
    """

    advantage_formula = "(R - mean_g(R)) / (std_step(R) + 1e-6)"

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Rewards [[0, 2], [4, 6]] give [[-1, 1], [-1, 1]] divided by the std of the four rewards, sqrt(20 / 3)."""
        return centred(rewards_PG) / (rewards_PG.std(ddof=1) + STD_FLOOR)


class ScaleRl:
    """R - m, divided by the std of R - m over the step (Khatri et al. 2025, "ScaleRL", arXiv 2510.13786).

    Unlike LitePpo's std, this std excludes the differences between prompts.
    """

    advantage_formula = "(R - mean_g(R)) / (std_step(R - mean_g(R)) + 1e-6)"

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Rewards [[0, 2], [4, 6]] give [[-1, 1], [-1, 1]] divided by their std, sqrt(4 / 3)."""
        centred_PG = centred(rewards_PG)
        return centred_PG / (centred_PG.std(ddof=1) + STD_FLOOR)


class ReinforcePlusPlus:
    """R, whitened over all tokens of the step (Hu 2025, "REINFORCE++", arXiv 2501.03262).

    There is no baseline per prompt. The mean and the std are over tokens, each with the total reward R of its
    completion, so that a completion's weight in them is its length.
    """

    advantage_formula = "(R - mean_tokens(R)) / (std_tokens(R) + 1e-6)"

    def advantages(
        self, rewards_PG: Float[np.ndarray, "P G"], lengths_PG: Int[np.ndarray, "P G"]
    ) -> Float[np.ndarray, "P G"]:
        """Rewards 0 and 3 of completions of 2 and 1 tokens give the returns 0 0 3, with mean 1 and std sqrt(3)."""
        tokens = max(int(lengths_PG.sum()), 1)
        mean = (lengths_PG * rewards_PG).sum() / tokens
        variance = (lengths_PG * np.square(rewards_PG - mean)).sum() / max(tokens - 1, 1)
        return (rewards_PG - mean) / (np.sqrt(variance) + STD_FLOOR) * uneven(rewards_PG.ravel())


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """R - m, whitened over all tokens of the step: the paper's form for several completions a prompt."""

    advantage_formula = "(C - mean_tokens(C)) / (std_tokens(C) + 1e-6); C = R - mean_g(R)"

    def advantages(
        self, rewards_PG: Float[np.ndarray, "P G"], lengths_PG: Int[np.ndarray, "P G"]
    ) -> Float[np.ndarray, "P G"]:
        """Rewards 0 and 2 of completions of 1 and 3 tokens give -1 1 1 1, with mean 1/2 and std 1."""
        return super().advantages(centred(rewards_PG), lengths_PG)


class MaxRl:
    """(R - m) / m, or 0 where m is 0 (Tajwar et al. 2026, "Maximum Likelihood RL", arXiv 2602.02710).

    With rewards 0 and 1, m estimates the probability of a right answer, and the objective becomes the logarithm of that
    probability, so that hard prompts count more.
    """

    advantage_formula = "(R - mean_g(R)) / mean_g(R) if mean_g(R) > 0 else 0"

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """[1, 0, 0, 0] becomes [3, -1, -1, -1]; [0, 0] stays [0, 0]. Raises RewardError for a reward below 0."""
        if (lowest := rewards_PG.min()) < 0.0:
            raise RewardError(
                f"algorithm.advantage=max_rl divides by the mean of a group and needs rewards >= 0, got {lowest}; "
                "change the rewards, or take another advantage"
            )
        mean_P1 = rewards_PG.mean(axis=1, keepdims=True)
        return centred(rewards_PG) / np.where(mean_P1 > 0.0, mean_P1, 1.0)


class Gdpo:
    """Each reward is standardized in its group, and the weighted sum is standardized over the step (Liu et al. 2026,
    arXiv 2601.05242).

    GRPO standardizes the weighted sum, so that different rewards with the same sum give the same advantage. Here

        A = sum_k weight_k (R_k - m_k) / std_k,   advantage = (A - mean of A) / std of A, both over the step

    Unlike in the paper, a reward adds 0 where it does not apply to a completion, and its mean and std in a group are
    over the completions that it applies to.
    """

    advantage_formula = (
        "(Z - mean_step(Z)) / (std_step(Z) + 1e-6); Z = sum_k(weight_k*(R_k - mean_g(R_k)) / (std_g(R_k) + 1e-6))"
    )

    def advantages(
        self,
        rewards_PG: Float[np.ndarray, "P G"],
        rewards_NPG: Float[np.ndarray, "N P G"],
        weights_N: Float[np.ndarray, " N"],
    ) -> Float[np.ndarray, "P G"]:
        """``rewards_PG``, the total of the rewards, only says which rows are scored."""
        values_NPG = np.ma.masked_invalid(rewards_NPG)
        scaled_NPG = centred(values_NPG) / (values_NPG.std(axis=-1, ddof=1, keepdims=True) + STD_FLOOR)
        sums_PG = np.einsum("n,npg->pg", weights_N, np.ma.filled(scaled_NPG, 0.0))
        sums_PG = np.ma.masked_array(sums_PG, np.ma.getmask(rewards_PG))
        return (sums_PG - sums_PG.mean()) / (sums_PG.std(ddof=1) + STD_FLOOR)


ADVANTAGES: Mapping[str, type] = {
    "grpo": Grpo,
    "drgrpo": DrGrpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "lite_ppo": LitePpo,
    "scale_rl": ScaleRl,
    "reinforce_pp": ReinforcePlusPlus,
    "reinforce_pp_baseline": ReinforcePlusPlusBaseline,
    "max_rl": MaxRl,
    "gdpo": Gdpo,
}
"""The classes that compute advantages, by the value of ``algorithm.advantage``."""
