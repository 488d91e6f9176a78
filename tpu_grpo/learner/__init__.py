"""Updates the policy from scored rollouts, on the trainer's devices; a run calls the methods of `Learner`."""

from tpu_grpo.learner.building import LearnerInputs, LearnerParts, build_parts
from tpu_grpo.learner.checkpoints import read_policy, read_stepped
from tpu_grpo.learner.frozen import FrozenModel
from tpu_grpo.learner.learner import DescribedLearner, Learner
from tpu_grpo.learner.parameters import cast_to_compute, checksums, freeze_untrained, frozen_leaves, parameters, whole
from tpu_grpo.learner.teachers import TeacherInputs

__all__ = [
    "DescribedLearner",
    "FrozenModel",
    "Learner",
    "LearnerInputs",
    "LearnerParts",
    "TeacherInputs",
    "build_parts",
    "cast_to_compute",
    "checksums",
    "freeze_untrained",
    "frozen_leaves",
    "parameters",
    "read_policy",
    "read_stepped",
    "whole",
]
