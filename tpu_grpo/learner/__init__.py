"""Advantages and policy updates: Tunix's GRPO learner behind `Learner`. The only room that imports ``tunix.rl``."""

from tpu_grpo.learner.adapter import SampledTexts, SamplingEngine
from tpu_grpo.learner.building import LearnerInputs
from tpu_grpo.learner.checkpoints import read_policy
from tpu_grpo.learner.learner import Learner
from tpu_grpo.learner.programs import LearnerPrograms
from tpu_grpo.learner.trained import freeze_untrained, frozen_leaves, parameters

__all__ = [
    "Learner",
    "LearnerInputs",
    "LearnerPrograms",
    "SampledTexts",
    "SamplingEngine",
    "freeze_untrained",
    "frozen_leaves",
    "parameters",
    "read_policy",
]
