"""Environments of Tunix's agentic trainer: classes that come from ``tunix.rl.agentic``'s ``BaseEnv``.

Tunix makes one for each conversation, ``Env(example, group_id=..., **env_kwargs)``; here a row's columns are the
example, and the options are ``env_kwargs``. A class whose constructor takes no example is made by its ``from_dict``, of
the columns and options together. ``reset`` takes nothing and returns (observation, info); ``step`` returns
(observation, reward, done, info). An action is the policy's text.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from tpu_grpo.environments.adapters.adapter import Adapter, ancestors

_BASE = "tunix.rl.agentic.environments.base_environment.BaseEnv"
_EXAMPLES = ("task", "single_example", "entry")
"""Constructors of Tunix's environments call the example so."""


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
        return self.instance.reset()
