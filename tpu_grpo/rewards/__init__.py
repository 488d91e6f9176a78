"""Rewards: the plugin protocol, loading, the ones that ship, and scoring a rollout with them."""

from tpu_grpo.rewards.loading import LoadedReward, load_reward
from tpu_grpo.rewards.protocol import Reward
from tpu_grpo.rewards.scoring import RewardSet, open_rewards
from tpu_grpo.rewards.sharing import SharedRewards
from tpu_grpo.rewards.shipped import SHIPPED

__all__ = ["SHIPPED", "LoadedReward", "Reward", "RewardSet", "SharedRewards", "load_reward", "open_rewards"]
