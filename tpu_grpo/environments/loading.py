"""The entry ``environment`` of the config is loaded: its names lead to classes that are known to fit.

    loaded = load_environments(config.environment)          # {"": LoadedEnvironment}, or one for each name of several
    check_columns(loaded, columns)                          # the data has what each reset requires
    check_choices(loaded, values, where)                    # a column `environment` names only what is there

Everything that can be known without a conversation is checked: the name, the file, the class, its constructor against
the options, its tools' schemas.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tpu_grpo.config.environment import EnvironmentSection
from tpu_grpo.environments.actions import LoadedEnvironment
from tpu_grpo.environments.adapters import adapter_for, own_options
from tpu_grpo.environments.adapters.adapter import Adapter, is_async
from tpu_grpo.environments.finding import find_environment, source_of
from tpu_grpo.environments.schemas import schema_of, tools_of
from tpu_grpo.environments.tools import RESERVED
from tpu_grpo.errors import EpisodeError

CHOICE_COLUMN = "environment"
"""This column of the data chooses among several environments; ``reset`` does not get it."""


def load_environments(section: EnvironmentSection) -> dict[str, LoadedEnvironment]:
    """Find every environment of the config; the key is its name in the table, "" for the only one.

    Raises:
        EpisodeError: for a name that leads nowhere, a class that is no environment, a tool without a schema, or options
            that it does not take.
    """
    return {key: _loaded(key, name, section.options) for key, name in section.names.items()}


def check_columns(loaded: Mapping[str, LoadedEnvironment], columns: Collection[str]) -> None:
    """Check that data with these columns has what each ``reset`` requires, and the choice if there are several.

    Raises:
        EpisodeError: for a column that is missing.
    """
    if "" not in loaded and CHOICE_COLUMN not in columns:
        raise EpisodeError(
            f"the data must have the column {CHOICE_COLUMN!r}, which chooses among the environments "
            f"{', '.join(loaded)}, got the columns {', '.join(columns)}; add it, or name one environment"
        )
    for environment in loaded.values():
        given = {*columns} - ({CHOICE_COLUMN} if "" not in loaded else set()) | {"seed"}
        for name in _required(environment):
            if name not in given:
                raise EpisodeError(
                    f"environment {environment.name}: reset requires {name!r}, which is no column of the data; "
                    f"columns: {', '.join(columns) or 'none'}. Add the column (data.columns gives one another name), "
                    "or give the parameter a default"
                )


def check_choices(loaded: Mapping[str, LoadedEnvironment], values: Iterable[Any], where: str) -> None:
    """Check that all values of the column ``environment`` in the data ``where`` are names of the config's table.

    Raises:
        EpisodeError: for one that is not.
    """
    for number, value in enumerate(values):
        if value not in loaded:
            raise EpisodeError(
                f"{where}, row {number}: the column {CHOICE_COLUMN!r} must be one of {', '.join(loaded)}, got "
                f"{value!r}; correct the data, or add the environment to the config's table"
            )


def reset_columns(loaded: Mapping[str, LoadedEnvironment], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that ``reset`` gets."""
    return {name: value for name, value in columns.items() if "" in loaded or name != CHOICE_COLUMN}


# --- a name -> what it stands for ------------------------------------------------------------------------------------


def _loaded(key: str, name: str, options: Mapping[str, Any]) -> LoadedEnvironment:
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
    return LoadedEnvironment(
        name=shown,
        source=source,
        takes="texts" if adapter else "calls",
        tools=tuple(schema_of(shown, target, tool) for tool in tools),
        is_async=adapter.is_async(target) if adapter else is_async(target, [*tools, *RESERVED]),
        gives_reward=adapter is not None or hasattr(target, "get_reward"),
        options=dict(options),
    )


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
