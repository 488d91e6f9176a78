"""Updates the policy: Tunix's GRPO learner behind `Learner`. This is the only room that imports ``tunix.rl``.

learner.py        what the pipeline drives: read this
rows.py           a scored rollout becomes the padded rows of a train step
loss.py           the loss, around an algorithm's token losses
routing.py        routing replay: the trainer's tokens pass the experts that the engine chose
agreement.py      how far engine and trainer are from each other
optimizer.py      the optimizer and its learning-rate schedule
checkpoints.py    saving and restoring;  digest.py: sums that tell whether parameters are the same
building.py       builds Tunix's learner;  tunix_learner.py, trainer.py: Tunix's classes with ours in their place
adapter.py        an engine as Tunix's rollout worker
trained.py        which parameters are trained
programs.py       the learner's programs without a learner, for planning
repairs.py        everything changed in google-tunix 0.1.7, each with its reason
"""

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
