"""Environments of Tunix's agentic trainer: classes that come from ``tunix.rl.agentic``'s ``BaseEnv``.

Tunix makes one for each conversation, ``Env(example, group_id=..., **env_kwargs)``; here a row's columns are the
example, and the options are ``env_kwargs``. A class whose constructor takes no example is made by its ``from_dict``, of
the columns and options together. ``reset`` takes nothing and returns (observation, info); ``step`` returns
(observation, reward, done, info). An action is the policy's text.

Of an observation that is a mapping, the policy is told ``prompts`` or ``question``, as by Tunix's agents. A first
observation that is the example, or one of its columns, is in the prompt already, and is left out.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from tpu_grpo.environments.adapters.adapter import Adapter, ancestors

_BASE = "tunix.rl.agentic.environments.base_environment.BaseEnv"
_EXAMPLES = ("task", "single_example", "entry")
"""Constructors of Tunix's environments call the example so."""
_QUESTIONS = ("prompts", "question")


class TunixAdapter(Adapter):
    """An environment of Tunix."""

    @staticmethod
    def fits(target: Any) -> bool:
        """Say whether a class comes from Tunix's BaseEnv."""
        return _BASE in ancestors(target)

    @staticmethod
    def entry(target: Any) -> Any:
        """Say that any column goes into the example."""
        return None

    @staticmethod
    def constructor(target: Any) -> Any:
        """Say that options and columns are mixed in the constructor."""
        return None

    def start(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Make the environment of a row, and reset it."""
        first = next(iter(inspect.signature(self.target).parameters), None)
        if first in _EXAMPLES:
            self.instance = self.target(dict(columns), **self.options)
        else:
            self.instance = self.target.from_dict({**columns, **self.options})
        observation, _ = self.instance.reset()
        told = _told(observation)
        return (None if told in (columns, *columns.values()) else told), {}

    def step(self, text: str) -> Any:
        """Give a text to the environment."""
        observation, *rest = self.instance.step(text)
        return _told(observation), *rest


def _told(observation: Any) -> Any:
    """Return what Tunix's agents tell the policy of an observation."""
    if isinstance(observation, Mapping):
        return next((observation[name] for name in _QUESTIONS if name in observation), observation)
    return observation
