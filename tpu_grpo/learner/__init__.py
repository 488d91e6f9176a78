"""Updates the policy from scored rollouts.

learner.py         what the pipeline drives: read this
packing.py         where sequences lie in training rows of fixed length
sequences.py       what of a completion is trained on: a conversation is one sequence or several
rows.py            sequences become packed rows;  token_weights.py: how much each token counts
token_advantages.py  what is added to the advantages of single tokens;  turn_credit.py: what turns were worth
signal.py          which groups can be learnt from, and which completions count in the loss
mini_batches.py    which prompts each of several updates learns from
routing.py         routing replay: the trainer's tokens pass the experts that the engine chose
batches.py         rows become micro-batches on the devices, with what the loss compares the policy to
kl_reward.py       the KL penalty in the reward;  reference.py: what it compares with;  entropy.py: an adapted bonus
numbers.py         the numbers that the loss takes as data
loss.py            the loss, around an algorithm's token losses;  forward.py: the model over packed rows
flat_products.py   the model's products on a CPU
output_head.py     log-probabilities and entropies in chunks;  head_split.py: how that work is divided
update.py          gradients add up in float32, and the optimizer steps once;  update_records.py: what that leaves
failed.py          updates whose loss or gradient is not finite;  update_metrics.py: the metrics of all
optimizers.py      the optimizers by name, and the learning rate;  compact.py: their state in eight bits
agreement.py       how far engine and trainer are from each other
saving.py          Orbax in the background, and errors of the disk that all hosts hear of
checkpoints.py     the checkpoints of a run;  restoring.py: reading one back, and whether it is sound
digest.py          sums that tell whether parameters are the same
trained.py         which parameters are trained
building.py        puts the parts together;  programs.py: the same without arrays, for planning
"""

from tpu_grpo.learner.building import LearnerInputs, cast_to_compute
from tpu_grpo.learner.digest import whole
from tpu_grpo.learner.learner import Learner
from tpu_grpo.learner.programs import LearnerPrograms
from tpu_grpo.learner.restoring import read_policy
from tpu_grpo.learner.trained import freeze_untrained, frozen_leaves, parameters

__all__ = [
    "Learner",
    "LearnerInputs",
    "LearnerPrograms",
    "cast_to_compute",
    "freeze_untrained",
    "frozen_leaves",
    "parameters",
    "read_policy",
    "whole",
]
