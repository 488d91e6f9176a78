"""DAPO (Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System", arXiv 2503.14476), section 3.

The objective (equation 8) is GRPO's with two changes: the ratio has more room above than below, clip_low = 0.2 and
clip_high = 0.28 ("clip-higher", section 3.1), and all tokens of a step count alike, so that a completion's
weight is proportional to its length (the aggregation token-mean, section 3.3). Its advantages are GRPO's (equation 9).

DAPO's soft punishment of overlong completions (section 3.4) is a reward; its dynamic sampling (section 3.2) is not part
of an algorithm here; without it, groups of equal rewards have advantages of zero.
"""

from tpu_grpo.algorithms.grpo import Grpo
from tpu_grpo.config import LossAggregation


class Dapo(Grpo):
    """GRPO with a larger clip_high, averaged over tokens."""

    aggregation: LossAggregation = "token-mean"

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None, delta: float | None = None
    ):
        super().__init__(clip_low, clip_high, dual_clip, delta)
