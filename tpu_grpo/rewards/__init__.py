"""Rewards: the plugin protocol, loading, where they run, the ones that ship, and scoring a rollout with them.

protocol.py   what a reward is: read this
finding.py    a name -> a function or class;  loading.py: fitted to the data
calling.py    one call, whatever the reward does;  answers.py: what goes in and comes out
pool.py       worker processes or a thread;  processes.py, worker.py: both ends of a process
scoring.py    a rollout -> Scores;  tables.py, asking.py: its steps
shipped/      the rewards that ship
"""

from tpu_grpo.rewards.loading import LoadedReward, load_reward, repeats_itself
from tpu_grpo.rewards.protocol import Reward, per_sample
from tpu_grpo.rewards.scoring import OpenReward, RewardSet, open_rewards
from tpu_grpo.rewards.sharing import DistributedRewards
from tpu_grpo.rewards.shipped import SHIPPED

__all__ = [
    "SHIPPED",
    "DistributedRewards",
    "LoadedReward",
    "OpenReward",
    "Reward",
    "RewardSet",
    "load_reward",
    "open_rewards",
    "per_sample",
    "repeats_itself",
]
