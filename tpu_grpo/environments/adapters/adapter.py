"""What an adapter does: it makes an environment of a class with ``step``, and takes the policy's texts to it.

A class is built and reset in its own way by each library; what ``step`` returns is read by ``values.step_of``.
"""

import functools
import inspect
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any, ClassVar


class Adapter:
    """One environment whose actions are texts."""

    called: ClassVar[tuple[str, ...]] = ("init", "reset", "step", "get_reward", "get_turn_rewards", "close")
    """Methods of the class that are called here, as far as it has them, and may have to be awaited."""
    instance: Any = None
    """The environment itself, once it is started."""

    def __init__(self, target: Any, options: Mapping[str, Any]):
        self.target = target
        self.options = options

    @staticmethod
    def fits(target: Any) -> bool:
        """Say whether this adapter is the one for a class."""
        raise NotImplementedError

    @staticmethod
    def entry(target: Any) -> Any:
        """Return the function that gets the columns of the data by name; None if it takes any."""
        raise NotImplementedError

    @staticmethod
    def constructor(target: Any) -> Any:
        """Return the function that gets the options by name; None if it is not to be checked."""
        return target

    def start(self, columns: Mapping[str, Any], seed: int) -> Any:
        """Make the environment and reset it; return its first observation, or something to await."""
        raise NotImplementedError

    def step(self, text: str) -> Any:
        """Return what the environment's ``step`` gives for a text of the policy, or something to await."""
        return self.instance.step(text)

    def close(self) -> Any:
        """Close the environment."""
        close = getattr(self.instance, "close", None)
        return close() if callable(close) else None


def fitting(function: Any, columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return those columns that a function takes, and ``seed`` if it names that and no column does."""
    parameters = parameters_of(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {name: value for name, value in columns.items() if takes_all or name in parameters}
    return {"seed": seed, **arguments} if "seed" in parameters else arguments


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, which are worked out once for a method of all instances of a class."""
    if inspect.ismethod(function) and inspect.isfunction(function.__func__):
        return _parameters_of_method(function.__func__)
    return inspect.signature(function).parameters


@functools.lru_cache(maxsize=256)
def _parameters_of_method(function: FunctionType) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function that is bound to an instance."""
    return inspect.signature(MethodType(function, object())).parameters


def ancestors(target: Any) -> list[str]:
    """Name a class and those that it comes from, as module.Class."""
    return [f"{c.__module__}.{c.__qualname__}" for c in getattr(target, "__mro__", ())]
