"""Messages as data has them become what a chat template takes: text contents, and tool calls with their arguments.

{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}], "name": None}
becomes {"role": "user", "content": "2+3?"}
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_grpo.records.errors import DataError

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
MORE_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Chat templates may use these beside role and content."""


def looks_like_messages(value: Any) -> bool:
    """Say whether a column's value is a list of messages, each a mapping with a role."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def read_messages(value: Any, column: str, where: str) -> list[Message]:
    """Return the messages that a column of a record holds, which errors call ``where``.

    Raises:
        DataError: for anything but a list of messages with text, and for images and the like, which are named.
    """
    if not looks_like_messages(value) or any(message["role"] not in ROLES for message in value):
        raise DataError(
            f"the column {column!r} must hold messages {{role, content}} with roles of {', '.join(ROLES)}, got "
            f"{value!r:.300} in {where}"
        )
    return [_message(message, column, where) for message in value]


def _message(given: Mapping[str, Any], column: str, where: str) -> Message:
    more = {
        key: given[key] for key in MORE_KEYS if given.get(key) is not None
    }  # tables have null for what is not there
    if "tool_calls" in more:
        more["tool_calls"] = [_with_arguments(call) for call in more["tool_calls"]]
    content = given.get("content")
    if content is None and more.get("tool_calls"):
        content = ""
    return {"role": given["role"], "content": _text(content, column, where), **more}


def _text(content: Any, column: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) and "type" in part for part in content):
        raise DataError(
            f"the column {column!r} must hold messages whose content is a text or a list of parts "
            f"{{type: text, text}}, got {content!r:.200} in {where}"
        )
    for part in content:
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"a prompt must be text, because the models here read nothing else, got a part of the type "
                f"{part['type']!r} in the column {column!r} of {where}; leave out records with images, sound or video"
            )
    return "".join(part["text"] for part in content)


def _with_arguments(call: Any) -> Any:
    """Give a tool call's arguments as an object; some data has them as its JSON, which templates would quote again."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
