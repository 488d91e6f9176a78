"""The schemas of an environment's tools, as chat templates take them.

They are made by transformers from type hints and docstrings in Google's style, as for TRL.
"""

import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from tpu_grpo.environments.tools import RESERVED
from tpu_grpo.records.errors import EpisodeError

_WRITTEN = (int, float, str, bool, type(None), Any, dict)
"""The schemas of arguments of these types say what a call writes; of other classes they say that it is an object."""


def tools_of(target: Any) -> dict[str, Any]:
    """Return the methods of a class that are tools: all public ones that are not RESERVED, in the order of names."""
    found = {}
    for name, member in inspect.getmembers(target, callable):
        is_method = inspect.isroutine(member) and not isinstance(inspect.getattr_static(target, name), staticmethod)
        if is_method and not name.startswith("_") and name not in RESERVED:
            found[name] = member
    return found


def schema_of(environment: str, target: Any, tool: str) -> Mapping[str, Any]:
    """Return the schema of a tool: {type: function, function: {name, description, parameters, return}}.

    Raises:
        EpisodeError: for a method without type hints or docstring, or with an argument that no call could give.
    """
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
    """Check that a call, which gives JSON's values by their names, can give what a tool takes."""
    hints = get_type_hints(method)
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise EpisodeError(
                f"{tool} must take its arguments by name, as calls give them, got {parameter}; drop the '/', or take a "
                "list in place of the '*'"
            )
        if (unknown := _unknown_in(hints[name])) is not None:
            raise EpisodeError(
                f"{tool} must take what a call can write, got {parameter} of the type {_shown(unknown)}, which the "
                "policy would see as an object without fields, and the tool get as a dict or text; make a choice a "
                "Literal, a list say of what (list[int]), and anything else a dict that the docstring describes"
            )


def _unknown_in(hint: Any) -> Any:
    """Return a type within a type hint that no schema says anything of; None if there is none such."""
    if get_origin(hint) is Literal:
        return None
    if get_origin(hint) is not None:
        return next((found for part in get_args(hint) if (found := _unknown_in(part)) is not None), None)
    is_known = hint in _WRITTEN or is_typeddict(hint) or (isinstance(hint, type) and issubclass(hint, Mapping))
    return None if is_known else hint


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
