"""GRPO and two variants: DAPO (larger clip_high, mean over tokens) and Dr. GRPO (no division by std or length)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.algorithms.algorithm import PerToken, TokenLosses, token_ratio
from tpu_grpo.config import LossAggregation
from tpu_grpo.records.errors import ConfigError


class Grpo:
    """Advantages that are standardized in the group, and the clipped surrogate.

    GRPO, Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300), section 4.1.

    For a prompt's G completions with rewards r_1 ... r_G, every token t of completion i has the advantage (section
    4.1.2)

        A_i = (r_i - mean(r)) / std(r)

    and the objective (equation 3, without its KL term, which tpu_grpo/learner/loss.py subtracts) is the mean over
    completions and their tokens of

        min(ratio_it A_i, clip(ratio_it, 1 - clip_low, 1 + clip_high) A_i),   ratio_it = policy(o_it) / old policy(o_it)

    Two things differ from the paper. The standard deviation divides by G - 1 and has 1e-6 added, so that a group of
    equal rewards has advantages of zero. clip_high may be larger than clip_low ("clip-higher", DAPO, Yu et al. 2025,
    arXiv 2503.14476, equation 10), so that the probability of unlikely tokens can grow more. With clip_low = clip_high
    = 0.2 the clip is the paper's.

    Where A_i < 0 the surrogate falls without bound as the ratio grows. Two settings, off by default, bound it:

        dual_clip c > 1               max(surrogate, c A_i)                     Ye et al. 2020, arXiv 1912.09729
        delta > 1 + clip_high         min(ratio, delta) in the first term       INTELLECT-2, arXiv 2505.07291

    With c = delta both settings give the same function: they change nothing for A_i >= 0, and stop at c A_i for
    A_i < 0.
    """

    aggregation: LossAggregation = "sequence-mean-token-mean"
    numbers = ("_lowest", "_highest", "_bound")
    advantage_formula = "(R - mean_g(R)) / (std_g(R) + 1e-6)"

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float | None = None,
        dual_clip: float | None = None,
        delta: float | None = None,
    ):
        self._lowest, self._highest = 1 - clip_low, 1 + (clip_low if clip_high is None else clip_high)
        self._bound = _bound(dual_clip, delta, self._highest)

    @property
    def formula(self) -> str:
        """The formula of a token's loss, with the bounds of the clip."""
        return self.surrogate_formula("r")

    def surrogate_formula(self, ratio: str) -> str:
        """Return the formula of `clipped_surrogate`, in which the ratio has the name ``ratio``."""
        loss = f"max(-{ratio}*A, -clip({ratio}, {self._lowest:g}, {self._highest:g})*A)"
        return loss if self._bound is None else f"min({loss}, -{self._bound:g}*A if A < 0 else inf)"

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Standardize the rewards of each group: [1, 2, 6] with mean 3, std sqrt(7) becomes [-2, -1, 3] / sqrt(7)."""
        return centred(rewards_PG) / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + 1e-6)

    def token_losses(self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken) -> TokenLosses:
        """Return minus the clipped surrogate, with each token's own ratio."""
        return self.clipped_surrogate(token_ratio(logprobs_BT, old_logprobs_BT), advantages_BT)

    def clipped_surrogate(self, ratio_BT: PerToken, advantages_BT: PerToken) -> TokenLosses:
        """Return minus the clipped surrogate: the maximum of two losses is minus the minimum of two objectives."""
        plain_BT = -advantages_BT * ratio_BT
        clipped_BT = -advantages_BT * jnp.clip(ratio_BT, self._lowest, self._highest)
        losses = TokenLosses(jnp.maximum(plain_BT, clipped_BT), clipped_BT > plain_BT)
        if self._bound is None:
            return losses
        bound_BT = jnp.where(advantages_BT < 0.0, -advantages_BT * self._bound, jnp.inf)
        return TokenLosses(jnp.minimum(losses.loss_BT, bound_BT), losses.clipped_BT | (losses.loss_BT > bound_BT))


class Dapo(Grpo):
    """GRPO with a larger clip_high, averaged over tokens.

    DAPO (Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System", arXiv 2503.14476), section 3.

    The objective (equation 8) is GRPO's with two changes. The clip is wider above than below: clip_low = 0.2 and
    clip_high = 0.28 ("clip-higher", section 3.1). All tokens of a step count alike, so that a completion's weight is
    proportional to its length (the aggregation token-mean, section 3.3). The advantages are GRPO's (equation 9).

    DAPO's soft punishment of overlong completions (section 3.4) is the reward ``overlong``, and its dynamic sampling
    (section 3.2) is the setting ``data.dynamic``. Without it, groups of equal rewards have advantages of zero.
    """

    aggregation: LossAggregation = "token-mean"

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None, delta: float | None = None
    ):
        super().__init__(clip_low, clip_high, dual_clip, delta)


class DrGrpo(Grpo):
    """GRPO without the division by the group's standard deviation and by the completion's length.

    Dr. GRPO, GRPO Done Right (Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv 2503.20783), section 3.

    GRPO's division by the group's standard deviation favours prompts that are very easy or very hard, and its division
    by a completion's length favours short correct and long wrong completions. Dr. GRPO has neither. The advantage is

        A_i = r_i - mean(r)

    and the token terms min(ratio_it A_i, clip(ratio_it, 1 - clip_low, 1 + clip_high) A_i) of a completion are summed
    and divided by a constant, here ``rollout.max_new_tokens`` (the aggregation sequence-mean-token-scale).
    """

    aggregation: LossAggregation = "sequence-mean-token-scale"
    advantage_formula = "R - mean_g(R)"

    def advantages(self, rewards_PG: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Subtract the mean of each group: [1, 2, 6] becomes [-2, -1, 3]."""
        return centred(rewards_PG)


def centred(rewards: Float[np.ndarray, "*groups G"]) -> Float[np.ndarray, "*groups G"]:
    """Subtract the mean of each group; equal rewards become exactly 0, which a rounded mean alone would miss."""
    return (rewards - rewards.mean(axis=-1, keepdims=True)) * uneven(rewards)


def uneven(rewards: Float[np.ndarray, "*groups G"]) -> Bool[np.ndarray, "*groups 1"]:
    """Mark the groups whose rewards are not all equal."""
    return rewards.max(axis=-1, keepdims=True) > rewards.min(axis=-1, keepdims=True)


def _bound(dual_clip: float | None, delta: float | None, highest: float) -> float | None:
    if dual_clip is not None and delta is not None:
        raise ConfigError(
            f"algorithm.dual_clip={dual_clip} and algorithm.delta={delta} exclude each other, being two names for one "
            "bound; set one of them"
        )
    if delta is not None and delta <= highest:
        raise ConfigError(
            f"algorithm.delta must be > 1 + clip_high = {highest}, got {delta}; a lower one would undo the clip: "
            "raise it"
        )
    return dual_clip if delta is None else delta
