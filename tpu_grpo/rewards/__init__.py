"""Scores the completions of a rollout. A completion passes through these files in order, and its score comes back up:

distributed.py   each host scores some of the groups, and all get the scores of all
scoring.py       a rollout -> Scores: every reward asked, weighted and summed
totals.py        what the rewards gave for a row -> its total; rows that none scores
early.py         groups that are complete while others are still sampled
asking.py        one reward is asked about rows, and on_error decides about its problems
batches.py       what goes to a reward and comes back: the rows in batches, the answers with their problems
feed.py          batches on their way to where a reward runs, and their deadlines
executors.py     where a reward runs: in a pool of workers, or on a thread
worker.py        a worker process, from both ends
calling.py       one call of a reward: exceptions and bad return values become Problems
hints.py         what may help with an exception of a reward that was written for another trainer
logged.py        what a reward logs beside its value
tokens.py        what rewards of single tokens give, checked, weighted and passed between hosts

protocol.py      what a reward is: read this to write one
signatures.py    how a function wants to be called: with a batch or a row, under which names
loading.py       an entry of the config -> a reward that fits the data
given.py         functions that were passed to tpu_grpo.train -> entries of the config
shipped/         the rewards that ship
workbench.py     rewards tried on a file of completions, without a model
"""

from tpu_grpo.rewards.distributed import DistributedRewards
from tpu_grpo.rewards.given import GivenReward, with_rewards
from tpu_grpo.rewards.loading import LoadedReward, load_reward, repeats_itself
from tpu_grpo.rewards.protocol import Reward, per_sample, per_token
from tpu_grpo.rewards.scoring import OpenReward, RewardSet, open_rewards
from tpu_grpo.rewards.shipped import SHIPPED

__all__ = [
    "SHIPPED",
    "DistributedRewards",
    "GivenReward",
    "LoadedReward",
    "OpenReward",
    "Reward",
    "RewardSet",
    "load_reward",
    "open_rewards",
    "per_sample",
    "per_token",
    "repeats_itself",
    "with_rewards",
]
