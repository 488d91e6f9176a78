"""What a tool may be called with: the values that JSON has, whichever way the policy writes them."""

import math
from typing import Any

from tpu_grpo.environments.actions import BadCall, ToolCall

MOST_DIGITS = 4000
"""Whole numbers may have about so many; Python writes out no more than 4,300."""
MOST_LEVELS = 64
"""Lists and objects may be nested so deep; processes cannot send each other what is nested far deeper."""
_MOST_BITS = MOST_DIGITS * 332 // 100


def checked(call: ToolCall | BadCall) -> ToolCall | BadCall:
    """Return a call with tuples as lists; a BadCall for values that JSON does not have, and for half characters."""
    if isinstance(call, BadCall):
        return call
    try:
        return ToolCall(_value(call.name), _value(dict(call.arguments)))
    except ValueError as error:
        return BadCall(str(error))


def _value(value: Any, level: int = 0) -> Any:
    if level > MOST_LEVELS:
        raise ValueError(f"arguments must be nested at most {MOST_LEVELS} levels deep")
    match value:
        case None | bool():
            return value
        case int():
            if value.bit_length() > _MOST_BITS:
                raise ValueError(f"a whole number must have at most {MOST_DIGITS:,} digits")
            return value
        case float():
            if not math.isfinite(value):
                raise ValueError(f"a number must be finite, got {value}")
            return value
        case str():
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError("a text must be of whole characters, got a half of a surrogate pair")
            return value
        case list() | tuple():
            return [_value(each, level + 1) for each in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {_value(key): _value(each, level + 1) for key, each in value.items()}
    raise ValueError(f"an argument must be text, a number, true, false, null, a list or an object, got {value!r:.80}")
