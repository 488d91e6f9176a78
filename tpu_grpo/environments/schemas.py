"""The schemas of an environment's tools, as chat templates take them.

They are made by transformers from type hints and docstrings in Google's style, as for TRL.
"""

import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any

from tpu_grpo.environments.tools import RESERVED
from tpu_grpo.errors import EpisodeError


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
        EpisodeError: for a method without type hints or docstring.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    member = getattr(target, tool)
    try:
        return get_json_schema(member if inspect.ismethod(member) else MethodType(member, target))
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        raise EpisodeError(
            f"environment {environment}: its public method {tool} is a tool, which must have a type hint for each "
            "argument and a docstring in Google's style that describes it and each argument (Args:), got one where "
            f"transformers says: {error}. Add them, or begin the name with an underscore if the policy must not call "
            "it; a class with step(action) that takes texts can be named by the option adapter: gym"
        ) from error
