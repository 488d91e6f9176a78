"""An environment of the config is loaded: its name leads to a class that is known to fit.

    environment = load_environment("my_game.py:Game", {"size": 3})
    check_columns(environment, columns)                 # the data has what its reset requires

Everything that can be known without a conversation is checked: the name, the file, the class, its constructor against
the options, its tools' schemas.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from tpu_grpo.environments.actions import LoadedEnvironment
from tpu_grpo.environments.adapters import adapter_for, own_options
from tpu_grpo.environments.adapters.adapter import Adapter
from tpu_grpo.environments.finding import find_environment, source_of
from tpu_grpo.environments.schemas import schema_of, tools_of
from tpu_grpo.environments.tools import AT_THE_END, RESERVED
from tpu_grpo.records.errors import EpisodeError


def load_environment(name: str, options: Mapping[str, Any], key: str = "") -> LoadedEnvironment:
    """Find an environment by its name in the config, and look at it.

    Args:
        name: a shipped name, path.py:Class or package.module:Class.
        options: what its constructor gets.
        key: its name in the config's table, if there are several.

    Raises:
        EpisodeError: for a name that leads nowhere, a class that is no environment, a tool without a schema, or options
            that it does not take.
    """
    source = source_of(name)
    target = find_environment(source)
    if not inspect.isclass(target):
        raise EpisodeError(
            f"environment {name} must be a class, of which each conversation gets an instance, got a "
            f"{type(target).__name__}; name a class"
        )
    shown = key or target.__name__
    adapter = adapter_for(target, options)
    tools = {} if adapter else tools_of(target)
    _check_methods(shown, target, adapter, tools)
    _check_options(shown, adapter.constructor(target) if adapter else target, own_options(options))
    methods = [m for m in (adapter.called if adapter else (*tools, *RESERVED)) if callable(getattr(target, m, None))]
    awaited = {method for method in methods if inspect.iscoroutinefunction(getattr(target, method))}
    return LoadedEnvironment(
        name=shown,
        source=source,
        takes="texts" if adapter else "calls",
        tools=tuple(schema_of(shown, target, tool) for tool in tools),
        is_async=bool(awaited) and all(name in awaited for name in methods if name not in AT_THE_END),
        awaits=bool(awaited),
        gives_turn_rewards=(by_turns := adapter is not None or hasattr(target, "get_turn_rewards")),
        gives_reward=by_turns or hasattr(target, "get_reward"),
        options=dict(options),
    )


def check_columns(environment: LoadedEnvironment, columns: Collection[str]) -> None:
    """Check that data with these columns has what the environment's ``reset`` requires.

    Raises:
        EpisodeError: for a column that is missing.
    """
    for name in _required(environment):
        if name not in (*columns, "seed"):
            raise EpisodeError(
                f"environment {environment.name}: reset requires {name!r}, which is no column of the data; columns: "
                f"{', '.join(columns) or 'none'}. Add the column (data.columns gives one another name), or give the "
                "parameter a default"
            )


# --- does the class fit? ---------------------------------------------------------------------------------------------


def _check_methods(name: str, target: Any, adapter: type[Adapter] | None, tools: Mapping[str, Any]) -> None:
    if adapter is not None:
        return
    if not callable(getattr(target, "reset", None)):
        raise EpisodeError(
            f"environment {name} must have a method reset, which begins a conversation with the columns of a row "
            "(def reset(self, **columns)), got a class without; add it"
        )
    if not tools and not hasattr(target, "get_reward"):
        raise EpisodeError(
            f"environment {name} must have tools, which are its public methods beside {', '.join(RESERVED)}, or a "
            "method step(action), or at least get_reward, got none of them; add a tool with type hints and docstring"
        )


def _required(environment: LoadedEnvironment) -> list[str]:
    """Name the parameters that must come from the data."""
    target = find_environment(environment.source)
    adapter = adapter_for(target, environment.options)
    entry = adapter.entry(target) if adapter else target.reset
    if entry is None:
        return []
    parameters = list(inspect.signature(entry).parameters.values())[1:]  # without self
    if by_position := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise EpisodeError(
            f"environment {environment.name}: reset must take its arguments by name, got positional-only "
            f"{by_position}; drop '/'"
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty]


def _check_options(name: str, constructor: Any, options: Mapping[str, Any]) -> None:
    """Check that a constructor takes the options, and requires nothing beside."""
    if constructor is None:
        return
    parameters = inspect.signature(constructor).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [option for option in options if option not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise EpisodeError(
            f"environment {name} does not take the options {unknown}; its constructor takes: "
            f"{', '.join(named) or 'none'}"
        )
    for parameter in parameters:
        is_filled = parameter.kind is not parameter.POSITIONAL_ONLY and parameter.name in options
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_filled and not is_variable:
            raise EpisodeError(
                f"environment {name}: its constructor requires {parameter.name!r}, which is no option; set it in "
                "environment.options, or give the parameter a default"
            )
