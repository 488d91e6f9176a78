"""Finds the class of an environment by its name, imports and checks it, and describes its tools."""

import inspect
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from tpu_grpo.config.plugins import find_function, not_shipped
from tpu_grpo.environments.actions import LoadedEnvironment
from tpu_grpo.environments.adapter_classes import adapter_for
from tpu_grpo.environments.shipped import SHIPPED
from tpu_grpo.environments.tool_values import AT_THE_END, RESERVED
from tpu_grpo.records.errors import EpisodeError

find_environment = partial(find_function, kind="environment", error=EpisodeError)
"""Returns the object that path.py:Class or package.module:Class names. Raises EpisodeError if there is none."""


_WRITTEN = (int, float, str, bool, type(None), Any, dict)
"""The types that a JSON schema can describe. Any other class appears in a schema as an object without fields."""


def tools_of(target: Any) -> dict[str, Any]:
    """Return the tools of a class: its public methods in alphabetical order, without static methods and RESERVED."""
    found = {}
    for name, member in inspect.getmembers(target, callable):
        is_method = inspect.isroutine(member) and not isinstance(inspect.getattr_static(target, name), staticmethod)
        if is_method and not name.startswith("_") and name not in RESERVED:
            found[name] = member
    return found


def schema_of(environment: str, target: Any, tool: str) -> Mapping[str, Any]:
    """Return the schema of a tool: {type: function, function: {name, description, parameters, return}}. Raises
    EpisodeError for a method without type hints or docstring, or with an argument that is not a JSON value."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    member = getattr(target, tool)
    method = member if inspect.ismethod(member) else MethodType(member, target)
    try:
        schema = get_json_schema(method)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        raise EpisodeError(
            f"environment {environment}: its public method {tool} is a tool, which must have a type hint for each "
            "argument and a docstring in Google's style that describes it and each argument (Args:), got one where "
            f"transformers says: {error}. Add them, or begin the name with an underscore if the policy must not call "
            "it; a class with step(action) that takes texts can be named by the option adapter: gym"
        ) from error
    _check_parameters(f"environment {environment}: its tool {tool}", method)
    return schema


def _check_parameters(tool: str, method: Any) -> None:
    """Check that the policy's calls can pass each argument of a tool: by name, and as a JSON value."""
    hints = get_type_hints(method)
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise EpisodeError(
                f"{tool} must take its arguments by name, as calls give them, got {parameter}; drop the '/', or take a "
                "list in place of the '*'"
            )
        if (unknown := _unknown_in(hints[name])) is not None:
            shown = unknown.__name__ if isinstance(unknown, type) else unknown
            raise EpisodeError(
                f"{tool} must take what a call can write, got {parameter} of the type {shown}, which the "
                "policy would see as an object without fields, and the tool get as a dict or text; make a choice a "
                "Literal, a list say of what (list[int]), and anything else a dict that the docstring describes"
            )


def _unknown_in(hint: Any) -> Any:
    """Return the first type in a type hint that no schema can describe; None if a schema can describe the hint."""
    if get_origin(hint) is Literal:
        return None
    if get_origin(hint) is not None:
        return next((found for part in get_args(hint) if (found := _unknown_in(part)) is not None), None)
    is_known = hint in _WRITTEN or is_typeddict(hint) or (isinstance(hint, type) and issubclass(hint, Mapping))
    return None if is_known else hint


def load_environment(name: str, options: Mapping[str, Any], key: str = "") -> LoadedEnvironment:
    """Find an environment by its name in the config, and check it; ``key`` is its key in the config's table, if any.

    Raises EpisodeError for a name that is not found, a class that is not an environment, a tool without a schema,
    options that the class does not take, or a ``reset`` that takes columns by position.
    """
    if ":" not in (source := SHIPPED.get(name, name)):
        raise not_shipped(repr(name), name, "environment", SHIPPED, EpisodeError, form="Class")
    target = find_environment(source)
    if not inspect.isclass(target):
        raise EpisodeError(
            f"environment {name} must be a class, of which each conversation gets an instance, got a "
            f"{type(target).__name__}; name a class"
        )
    shown = key or target.__name__
    adapter, own = adapter_for(target, options)
    tools = tools_of(target) if adapter.takes == "calls" else {}
    if adapter.takes == "calls":
        _check_methods(shown, target, tools)
    _check_options(shown, adapter.constructor(target), own)
    methods = [method for method in (*tools, *adapter.called) if callable(getattr(target, method, None))]
    awaited = {method for method in methods if inspect.iscoroutinefunction(getattr(target, method))}
    return LoadedEnvironment(
        name=shown,
        source=source,
        takes=adapter.takes,
        tools=tuple(schema_of(shown, target, tool) for tool in tools),
        is_async=bool(awaited) and all(name in awaited for name in methods if name not in AT_THE_END),
        awaits=bool(awaited),
        gives_turn_rewards=(by_turns := adapter.takes == "texts" or hasattr(target, "get_turn_rewards")),
        gives_reward=by_turns or hasattr(target, "get_reward"),
        options=dict(options),
        requires=_required(shown, target) if adapter.resets_by_name else (),
    )


# --- does the class fit? ---------------------------------------------------------------------------------------------


def _check_methods(name: str, target: Any, tools: Mapping[str, Any]) -> None:
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


def _required(name: str, target: Any) -> tuple[str, ...]:
    """Return the columns that a class's ``reset`` requires."""
    parameters = list(inspect.signature(target.reset).parameters.values())[1:]  # without self
    if by_position := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise EpisodeError(
            f"environment {name}: reset must take its arguments by name, got positional-only {by_position}; drop '/'"
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(p.name for p in named if p.default is p.empty and p.name != "seed")


def _check_options(name: str, constructor: Any, options: Mapping[str, Any]) -> None:
    """Check that a constructor takes the options, and has no other required parameters."""
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
