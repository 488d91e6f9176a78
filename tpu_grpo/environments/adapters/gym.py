"""Environments in the manner of Gym and Gymnasium.

    class Game:
        def reset(self, level, seed=None): ...      # -> observation, or (observation, info)
        def step(self, action): ...                 # -> (observation, reward, done, info), or with two endings

The constructor gets the options, and ``reset`` the columns that it names and ``seed``; an action is the policy's text.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from tpu_grpo.environments.adapters.adapter import Adapter, ancestors, fitting

_BASES = ("gymnasium.core.Env", "gym.core.Env")
_BESIDE = {"reset", "step", "close", "render", "seed", "state", "get_reward", "get_turn_rewards"}
"""A class that has ``step`` and other public methods than these is taken for one of tools."""


class GymAdapter(Adapter):
    """An environment with ``reset`` and ``step``."""

    @staticmethod
    def fits(target: Any) -> bool:
        """Say whether this is Gym's Env, or a class with ``reset`` and ``step`` and nothing to call beside them."""
        if any(name in _BASES for name in ancestors(target)):
            return True
        members = {name for name, _ in inspect.getmembers(target, callable) if not name.startswith("_")}
        return {"reset", "step"} <= members <= _BESIDE

    @staticmethod
    def entry(target: Any) -> Any:
        """Return ``reset``."""
        return target.reset

    def start(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Make the environment of the options, and reset it with the columns."""
        self.instance = self.target(**self.options)
        return self.instance.reset(**fitting(self.instance.reset, columns, seed))
