"""Advantages and policy updates: Tunix's GRPO learner behind `Learner`. The only room that imports ``tunix.rl``."""

from tpu_grpo.learner.adapter import SampledTexts, SamplingEngine
from tpu_grpo.learner.learner import Learner
from tpu_grpo.learner.trained import frozen_leaves

__all__ = ["Learner", "SampledTexts", "SamplingEngine", "frozen_leaves"]
