"""Environments of SkyRL-Gym: classes with ``init(prompt)`` and ``step(action)``, and no ``reset``.

    class Game(BaseTextEnv):
        def __init__(self, env_config, extras): ...     # the options, and a row's columns
        def init(self, prompt): ...                     # -> (prompt, metadata); messages may be added to the prompt
        def step(self, action): ...                     # -> {observations: [messages], reward, done, metadata}

The prompt is the row's, as messages. What ``init`` adds to it is the first observation; it cannot take anything away.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from tpu_grpo.environments.adapters.adapter import Adapter
from tpu_grpo.environments.values import WrongError


class SkyrlAdapter(Adapter):
    """An environment of SkyRL-Gym."""

    @staticmethod
    def fits(target: Any) -> bool:
        """Say whether a class has ``init`` and ``step`` and no ``reset``."""
        return all(callable(getattr(target, name, None)) for name in ("init", "step")) and not hasattr(target, "reset")

    @staticmethod
    def entry(target: Any) -> Any:
        """Say that any column goes into the extras."""
        return None

    @staticmethod
    def constructor(target: Any) -> Any:
        """Return what gets the options by name, unless they are SkyRL's one mapping."""
        return None if "env_config" in inspect.signature(target).parameters else target

    def start(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Make the environment of a row, and give it the prompt."""
        parameters = inspect.signature(self.target).parameters
        is_whole = "env_config" in parameters
        given: dict[str, Any] = {"env_config": Config(self.options)} if is_whole else dict(self.options)
        if "extras" in parameters:
            given["extras"] = dict(columns)
        self.instance = self.target(**given)
        prompt = _messages(columns.get("prompt"))
        returned = self.instance.init([dict(message) for message in prompt])
        given_back = returned[0] if isinstance(returned, tuple) else returned
        if list(given_back[: len(prompt)]) != prompt:
            raise WrongError(
                "must return the prompt that init got, with messages added at most; change the data instead"
            )
        return list(given_back[len(prompt) :])


class Config(dict[str, Any]):
    """The options as SkyRL's environments read them: by key, or as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt or ())
