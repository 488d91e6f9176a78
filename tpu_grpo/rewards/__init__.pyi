# The public names of this package, for type checkers and for the loader, which imports them when they are first used.

from .distributed import DistributedRewards as DistributedRewards
from .protocol import Reward as Reward, per_sample as per_sample, per_token as per_token
from .reward_functions import (
    GivenReward as GivenReward,
    load_reward as load_reward,
    repeats_itself as repeats_itself,
    reward_specs as reward_specs,
)
from .reward_runner import OpenReward as OpenReward
from .scoring import RewardSet as RewardSet, open_rewards as open_rewards
from .shipped import SHIPPED as SHIPPED
