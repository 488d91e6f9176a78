"""Scores the completions of a rollout: calls the rewards, sums their weighted values, and sends the sums to all hosts.

To write a reward, read tpu_grpo/rewards/protocol.py; the shipped rewards are in tpu_grpo/rewards/shipped/.
"""

from tpu_grpo.rewards.distributed import DistributedRewards
from tpu_grpo.rewards.protocol import Reward, per_sample, per_token
from tpu_grpo.rewards.reward_functions import GivenReward, load_reward, repeats_itself, reward_specs
from tpu_grpo.rewards.reward_runner import OpenReward
from tpu_grpo.rewards.scoring import RewardSet, open_rewards
from tpu_grpo.rewards.shipped import SHIPPED

__all__ = [
    "SHIPPED",
    "DistributedRewards",
    "GivenReward",
    "OpenReward",
    "Reward",
    "RewardSet",
    "load_reward",
    "open_rewards",
    "per_sample",
    "per_token",
    "repeats_itself",
    "reward_specs",
]
