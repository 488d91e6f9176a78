"""Tool calls that are JSON objects: Hermes and Qwen write each in tags, Llama 3 writes it alone.

<tool_call>                                          {"name": "add", "parameters": {"a": 47, "b": 38}}
{"name": "add", "arguments": {"a": 47, "b": 38}}
</tool_call>
"""

import json
import re
from contextlib import suppress
from typing import Any, NoReturn

from tpu_grpo.environments.actions import BadCall, ToolCall

OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
Calls = list[ToolCall | BadCall]
_BARE = re.compile(r"\{\s*[\"'](name|parameters|arguments|function|type)[\"']")
"""How an object begins that is meant as a call; other text that begins with a brace is an answer."""


def read_hermes(text: str, *, ended: bool) -> tuple[str, Calls]:
    """Return the text around the calls of a turn, and the calls; a turn that was cut loses a call that is not closed.

    A closing tag inside an argument's text is part of that text.
    """
    content, calls, at = "", [], 0
    while (opened := text.find(OPEN, at)) >= 0:
        content += text[at:opened]
        begin = opened + len(OPEN)
        call, behind = _decode(text, begin)
        closed = text.find(CLOSE, behind)
        if closed < 0:
            return content, [*calls, *_unclosed(ended)]
        if (rest := text[behind:closed].strip()) and not isinstance(call, BadCall):
            call = BadCall(f"the call is not JSON alone: {_short(rest)} follows it before {CLOSE}")
        calls.append(call)
        at = closed + len(CLOSE)
    return content + text[at:], calls


def read_llama3(text: str, *, ended: bool) -> tuple[str, Calls]:
    """Return the text before the calls of a turn, and the calls, separated by semicolons; see `read_hermes`."""
    content, calls_text = "", text
    if _BARE.match(text.lstrip()) is None:  # else a tag stands in an argument
        content, tag, calls_text = text.partition(PYTHON_TAG)
        if not tag:
            return text, []
    calls, at = [], 0
    while calls_text[at:].strip():
        call, behind = _decode(calls_text, at)
        if isinstance(call, BadCall) and behind == at:  # where it ends cannot be told
            return content, [*calls, *([call] if ended else [])]
        rest = calls_text[behind:].lstrip()
        calls.append(call)
        if rest and not rest.startswith(";"):
            return content, [*calls, BadCall(f"calls must be separated by semicolons: {_short(rest)} follows a call")]
        at = len(calls_text) - len(rest) + 1
    return content, calls


def _unclosed(ended: bool) -> Calls:
    return [BadCall(f"the call is not closed: {CLOSE} is missing")] if ended else []


def _decode(text: str, begin: int) -> tuple[ToolCall | BadCall, int]:
    """Read the JSON value from a place on; return the call and the place after it, or ``begin`` for no JSON."""
    start = begin + len(text[begin:]) - len(text[begin:].lstrip())
    try:
        value, behind = _DECODER.raw_decode(text, start)
    except RecursionError:
        return BadCall("the call is not JSON: it is nested too deep"), begin
    except json.JSONDecodeError as error:
        return BadCall(f"the call is not JSON: {error.msg} at character {error.pos - start} of it"), begin
    except ValueError as error:  # a number of too many digits, or one that JSON does not have
        return BadCall(f"the call is not JSON: {error}"), begin
    return _call(value), behind


def _call(value: Any) -> ToolCall | BadCall:
    """Read a call from its JSON value: an object with a name, and an object of arguments or that object's JSON."""
    if not isinstance(value, dict):
        return BadCall(f"the call must be a JSON object with a name and arguments, got {_short(json.dumps(value))}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return BadCall(f"the call must name a tool, its keys are {', '.join(value) or 'none'}")
    if unknown := [key for key in value if key not in ("name", "arguments", "parameters", "type", "id")]:
        return BadCall(f"the call must have a name and arguments, got {_short(', '.join(unknown))} beside them")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = _DECODER.decode(arguments)
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments must be a JSON object, got {_short(json.dumps(arguments))}")
    return ToolCall(name, arguments)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
