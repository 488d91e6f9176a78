"""Environments of OpenEnv, through its clients: classes that come from ``openenv``'s ``EnvClient``.

The options go to the client's constructor (``base_url``); ``reset`` gets the columns that the server's reset knows as
keyword arguments, and ``step`` an action of the class that the client names, ``class EchoEnv(EnvClient[EchoAction,
...])``. An action with one required field gets the policy's text there. Any other is read from the text as JSON.
The observation's fields, without its reward and bookkeeping, are what the policy is told: a single one as it is,
several as JSON.

Clients are asynchronous; this adapter uses their synchronous form, ``sync()``, in a process of each conversation.
"""

import json
import typing
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tpu_grpo.environments.adapters.adapter import Adapter, ancestors

_BASES = ("EnvClient", "HTTPEnvClient", "SyncEnvClient")
_BOOKKEEPING = ("reward", "done", "metadata")


class OpenenvAdapter(Adapter):
    """An environment of OpenEnv on its server."""

    called = ()  # but those of a client's synchronous form

    @staticmethod
    def fits(target: Any) -> bool:
        """Say whether a class is a client of OpenEnv."""
        return any(n.split(".")[0] in ("openenv", "openenv_core") and n.endswith(_BASES) for n in ancestors(target))

    @staticmethod
    def entry(target: Any) -> Any:
        """Say that any column may be passed."""
        return None

    def start(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Connect to the server and reset the environment."""
        client = self.target(**self.options)
        self.instance = client.sync() if hasattr(client, "sync") else client
        if hasattr(self.instance, "connect"):
            self.instance.connect()
        result = self.instance.reset(**{"seed": seed, **columns})
        return _observed(result.observation)

    def step(self, text: str) -> Any:
        """Make an action of a text, and do it."""
        result = self.instance.step(_action(self.target, text))
        return SimpleNamespace(observation=_observed(result.observation), reward=result.reward, done=result.done)


def _action(target: Any, text: str) -> Any:
    """Make the action that a text stands for.

    Raises:
        ValueError: for a text that is no JSON object, where an action has several fields.
    """
    action = _action_class(target)
    if action is None:
        return json.loads(text)
    required = [name for name, field in action.model_fields.items() if field.is_required()]
    return action(**{required[0]: text}) if len(required) == 1 else action(**json.loads(text))


def _action_class(target: Any) -> Any:
    """Return the class that a client names for its actions; None if it takes any mapping."""
    for base in (b for c in target.__mro__ for b in getattr(c, "__orig_bases__", ())):
        for argument in typing.get_args(base)[:1]:
            if hasattr(argument, "model_fields"):
                return argument
    return None


def _observed(observation: Any) -> Any:
    fields = observation.model_dump() if hasattr(observation, "model_dump") else observation
    if not isinstance(fields, Mapping):
        return fields
    told = {name: value for name, value in fields.items() if name not in _BOOKKEEPING and value is not None}
    return next(iter(told.values())) if len(told) == 1 else json.dumps(told, ensure_ascii=False, default=str)
