"""Adapters for the classes of environments: with tools, of Gym, Tunix and OpenEnv, and agents.

Unless the option ``adapter`` names an adapter, the first one in ADAPTERS that fits the class is used.
"""

import inspect
import json
import typing
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

from tpu_grpo.environments.tool_values import RESERVED, parameters_of
from tpu_grpo.records.errors import EpisodeError


class Adapter:
    """Wraps one environment, so that environments of all libraries are called in the same way."""

    called: ClassVar[tuple[str, ...]] = ("reset", "step", "get_reward", "get_turn_rewards", "close")
    """The methods that the adapter calls if the class has them; they may be async."""
    takes: ClassVar[str] = "texts"
    """With "texts", ``step`` gets the policy's turn as text. With "answers", ``step`` gets the whole `Action`, and
    returns `Answered` with the agent's next request. With "calls" there is no ``step``."""
    resets_by_name: ClassVar[bool] = False
    """Whether ``reset`` gets data columns as keyword arguments, so that its required parameters must be columns."""
    instance: Any = None
    """The user's environment; None before ``start``."""

    def __init__(self, target: Any, options: Mapping[str, Any]):
        self.target = target
        self.options = options

    @staticmethod
    def fits(target: Any) -> bool:
        """Whether this adapter fits a class."""
        raise NotImplementedError

    @staticmethod
    def constructor(target: Any) -> Any:
        """Return the function whose parameters the options must fit; None if the options are not checked."""
        return target

    def start(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Build the environment and reset it; return its first observation, or an awaitable of it."""
        raise NotImplementedError

    def step(self, turn: Any) -> Any:
        """Return the result of the environment's ``step`` for a turn of the policy, or an awaitable of it."""
        return self.instance.step(turn)

    def close(self) -> Any:
        """Close the environment."""
        close = getattr(self.instance, "close", None)
        return close() if callable(close) else None


def fitting(function: Any, columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the columns that a function accepts, and ``seed`` if the function takes it and no column has that name."""
    parameters = parameters_of(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {name: value for name, value in columns.items() if takes_all or name in parameters}
    return {"seed": seed, **arguments} if "seed" in parameters else arguments


def ancestors(target: Any) -> list[str]:
    """Return the names of a class and its base classes, as module.Class."""
    return [f"{c.__module__}.{c.__qualname__}" for c in getattr(target, "__mro__", ())]


_GYM_BASES = ("gymnasium.core.Env", "gym.core.Env")
_BESIDE = {"reset", "step", "close", "render", "seed", "state", "get_reward", "get_turn_rewards"}
"""A class with ``step`` and other public methods than these is not adapted: its public methods are its tools."""


class GymAdapter(Adapter):
    """An environment with ``reset`` and ``step``."""

    resets_by_name = True

    @staticmethod
    def fits(target: Any) -> bool:
        """Whether a class inherits from Gym's Env, or has ``reset``, ``step`` and no public methods outside _BESIDE."""
        if any(name in _GYM_BASES for name in ancestors(target)):
            return True
        members = {name for name, _ in inspect.getmembers(target, callable) if not name.startswith("_")}
        return {"reset", "step"} <= members <= _BESIDE

    def start(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Build the environment with the options, and reset it with the columns."""
        self.instance = self.target(**self.options)
        return self.instance.reset(**fitting(self.instance.reset, columns, seed))


class AgentAdapter(GymAdapter):
    """An agent, which asks the policy for turns (tpu_grpo/environments/shipped/agent.py)."""

    takes = "answers"

    @staticmethod
    def fits(target: Any) -> bool:
        """Whether the class sets ``asks_for_turns`` to True."""
        return getattr(target, "asks_for_turns", False) is True


class ToolsAdapter(GymAdapter):
    """An environment whose public methods are tools, even a method named ``step``."""

    called = RESERVED
    takes = "calls"

    @staticmethod
    def fits(target: Any) -> bool:
        """Return True, for the classes that no other adapter fits."""
        return True

    def close(self) -> Any:
        """Close the environment if its class has ``close``; the instance itself may have attributes of any name."""
        return super().close() if callable(getattr(self.target, "close", None)) else None


_BASE = "tunix.rl.agentic.environments.base_environment.BaseEnv"
_EXAMPLES = ("task", "single_example", "entry")
"""If the first parameter of a Tunix environment's constructor has one of these names, it gets the columns as a dict."""
_QUESTIONS = ("prompts", "question")


class TunixAdapter(Adapter):
    """An environment of Tunix."""

    @staticmethod
    def fits(target: Any) -> bool:
        """Whether a class inherits from Tunix's BaseEnv."""
        return _BASE in ancestors(target)

    @staticmethod
    def constructor(target: Any) -> Any:
        """Return None (no check), because the constructor receives options and columns together."""
        return None

    def start(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Build the environment of a row, and reset it; an observation that only repeats a column is dropped."""
        first = next(iter(inspect.signature(self.target).parameters), None)
        if first in _EXAMPLES:
            self.instance = self.target(dict(columns), **self.options)
        else:
            self.instance = self.target.from_dict({**columns, **self.options})
        observation, _ = self.instance.reset()
        shown = _shown_part(observation)
        return (None if shown in (columns, *columns.values()) else shown), {}

    def step(self, turn: str) -> Any:
        """Call the environment's ``step`` with a text."""
        observation, *rest = self.instance.step(turn)
        return _shown_part(observation), *rest


def _shown_part(observation: Any) -> Any:
    """Return the part of an observation that Tunix's agents show to the policy."""
    if isinstance(observation, Mapping):
        return next((observation[name] for name in _QUESTIONS if name in observation), observation)
    return observation


_BASES = ("EnvClient", "HTTPEnvClient", "SyncEnvClient")
_BOOKKEEPING = ("reward", "done", "metadata")


class OpenenvAdapter(Adapter):
    """An environment on an OpenEnv server, which is used through a client class."""

    called = ()  # only methods of the client's synchronous form are called

    @staticmethod
    def fits(target: Any) -> bool:
        """Whether a class is a client of OpenEnv."""
        return any(n.split(".")[0] in ("openenv", "openenv_core") and n.endswith(_BASES) for n in ancestors(target))

    def start(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Connect to the server and reset the environment."""
        client = self.target(**self.options)
        self.instance = client.sync() if hasattr(client, "sync") else client
        if hasattr(self.instance, "connect"):
            self.instance.connect()
        result = self.instance.reset(**{"seed": seed, **columns})
        return _observed(result.observation)

    def step(self, turn: str) -> Any:
        """Convert a text to the action type of the client's class, and send this action to the server."""
        result = self.instance.step(_action(self.target, turn))
        return SimpleNamespace(observation=_observed(result.observation), reward=result.reward, done=result.done)


def _action(target: Any, text: str) -> Any:
    """Convert a text to the client's action type. If the type has exactly one required field, that field gets the text;
    otherwise the text is parsed as JSON. Raises ValueError if the conversion fails."""
    bases = (base for each in target.__mro__ for base in getattr(each, "__orig_bases__", ()))
    named = (argument for base in bases for argument in typing.get_args(base)[:1])  # the client's class for its actions
    if (action := next((each for each in named if hasattr(each, "model_fields")), None)) is None:
        return json.loads(text)  # the client takes any mapping
    required = [name for name, field in action.model_fields.items() if field.is_required()]
    return action(**{required[0]: text}) if len(required) == 1 else action(**json.loads(text))


def _observed(observation: Any) -> Any:
    fields = observation.model_dump() if hasattr(observation, "model_dump") else observation
    if not isinstance(fields, Mapping):
        return fields
    shown = {name: value for name, value in fields.items() if name not in _BOOKKEEPING and value is not None}
    return next(iter(shown.values())) if len(shown) == 1 else json.dumps(shown, ensure_ascii=False, default=str)


OPTION = "adapter"
ADAPTERS: Mapping[str, type[Adapter]] = MappingProxyType(
    {
        "agent": AgentAdapter,
        "tunix": TunixAdapter,
        "openenv": OpenenvAdapter,
        "gym": GymAdapter,
        "tools": ToolsAdapter,
    }
)


def adapter_for(target: Any, options: Mapping[str, Any]) -> tuple[type[Adapter], dict[str, Any]]:
    """Return (the adapter for a class, the options for the class itself). Raises EpisodeError for an unknown name in
    the option ``adapter``."""
    own = {name: value for name, value in options.items() if name != OPTION}
    if (named := options.get(OPTION)) is None:
        return next(adapter for adapter in ADAPTERS.values() if adapter.fits(target)), own
    if not isinstance(named, str) or named not in ADAPTERS:
        raise EpisodeError(f"the environment's option adapter must be one of {', '.join(ADAPTERS)}, got {named!r}")
    return ADAPTERS[named], own
