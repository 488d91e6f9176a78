"""Tool calls as Qwen3-Coder writes them: tags around text, which becomes values by the types of the tool's schema.

<tool_call>
<function=add>
<parameter=a>
47
</parameter>
</function>
</tool_call>
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tpu_grpo.environments.actions import BadCall, ToolCall
from tpu_grpo.environments.dialects.json_calls import CLOSE, OPEN, Calls

Schemas = Mapping[str, Mapping[str, Any]]
"""The properties of each tool's parameters, by the tool's name: {"add": {"a": {"type": "integer"}}}."""
END, PARAMETER_END = "</function>", "</parameter>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_WORDS = {"true": True, "false": False}
_KINDS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "object": "a JSON object",
    "array": "a JSON list",
}


def read_qwen3_coder(text: str, schemas: Schemas, *, ended: bool) -> tuple[str, Calls]:
    """Return the text around the calls of a turn, and the calls; a cut turn loses a call that is not closed."""
    content, calls, at = "", [], 0
    while (opened := text.find(OPEN, at)) >= 0:
        content += text[at:opened]
        closed = text.find(CLOSE, opened)
        if closed < 0:
            return content, [*calls, *([BadCall(f"the call is not closed: {CLOSE} is missing")] if ended else [])]
        calls.append(_function(text[opened + len(OPEN) : closed], schemas))
        at = closed + len(CLOSE)
    return content + text[at:], calls


def _function(body: str, schemas: Schemas) -> ToolCall | BadCall:
    if (begins := _FUNCTION.match(body)) is None or not begins[1].strip():
        return BadCall("the call must begin with <function=NAME>")
    if not body.rstrip().endswith(END):
        return BadCall(f"the call is not closed: {END} is missing")
    name, inside = begins[1].strip(), body.rstrip()[: -len(END)]
    arguments: dict[str, Any] = {}
    at = begins.end()
    while (parameter := _PARAMETER.match(inside, at)) is not None:
        key, closed = parameter[1].strip(), inside.find(PARAMETER_END, parameter.end())
        if closed < 0:
            return BadCall(f"the parameter {key} is not closed: {PARAMETER_END} is missing")
        if key in arguments:
            return BadCall(f"the parameter {key} is given twice")
        text = inside[parameter.end() : closed].removeprefix("\n").removesuffix("\n")
        value = _value(text, key, schemas.get(name, {}).get(key))
        if isinstance(value, BadCall):
            return value
        arguments[key] = value
        at = closed + len(PARAMETER_END)
    if rest := inside[at:].strip():
        return BadCall(f"the call must hold <parameter=NAME> tags alone, got {rest[:80]}")
    return ToolCall(name, arguments)


def _value(text: str, key: str, schema: Any) -> Any:
    """Return a text as the first of the schema's types that it can be; as it is where nothing is known of it."""
    types = _types(schema)
    if not types:
        return text
    for kind in sorted(types, key=lambda kind: kind == "string"):  # text is what anything can be
        try:
            return _as(kind, text)
        except (ValueError, RecursionError):
            continue
    wanted = " or ".join(_KINDS.get(kind, kind) for kind in types)
    return BadCall(f"the parameter {key} must be {wanted}, got {text[:80]}")


def _types(schema: Any) -> list[str]:
    """Return the JSON types that a schema takes, of ``type``, ``anyOf`` or ``oneOf``; those of an enum's values."""
    if not isinstance(schema, Mapping):
        return []
    named = schema.get("type")
    if named is not None:
        found = [named] if isinstance(named, str) else list(named)
        return [*found, "null"] if schema.get("nullable") else found
    if options := schema.get("anyOf", schema.get("oneOf")):
        return [kind for option in options for kind in _types(option)]
    return []


def _as(kind: str, text: str) -> Any:
    """Return a text as a value of a JSON type; ValueError if it is none."""
    bare = text.strip()
    match kind:
        case "string":
            return text
        case "integer":
            return int(bare)
        case "number":
            try:
                return int(bare)
            except ValueError:
                return float(bare)
        case "boolean":
            if bare.lower() not in _WORDS:
                raise ValueError
            return _WORDS[bare.lower()]
        case "null":
            if bare.lower() not in ("null", "none"):
                raise ValueError
            return None
    value = json.loads(bare)
    if not isinstance(value, dict if kind == "object" else list):
        raise ValueError
    return value
