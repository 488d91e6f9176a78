"""Turns a record into the conversation that the model gets, a list of {role, content}.

    system     data.system_prompt
    user       the record, by data.prompt_template

If data.messages names a column, the messages in that column replace the user's message above. The same happens if
data.prompt_template is a single column that holds messages. Messages of a column are converted to what chat templates
take, with contents as text, and the arguments of tool calls as an object:

    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}], "name": None}
    becomes {"role": "user", "content": "2+3?"}
"""

import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_grpo.config import DataSection
from tpu_grpo.records.errors import ConfigError, DataError

Record = Mapping[str, Any]
Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
MORE_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""The keys of a message that chat templates may use, besides role and content."""
QUESTION = "question"
"""The column that the default template uses."""
IN_ITS_PLACE = ("prompt", "problem", "messages", "conversations", "instruction")
"""If there is no column question, the first of these columns that exists is used. If that is instruction, the column
input is appended."""
LIKELY = (QUESTION, *IN_ITS_PLACE, "query", "input", "task", "text", "ctx")
"""An error about a missing column proposes one whose name ends with one of these words, the first of them first."""
SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
"""The role for each name in ShareGPT's messages {from, value}; any other name is itself the role."""


class Conversation:
    """Builds the messages of records by the template of the data section. Raises ConfigError for a malformed one."""

    def __init__(self, data: DataSection):
        self._data = data
        self._template = Template(data.prompt_template)
        self._before: list[Message] = []
        if data.system_prompt:
            self._before.append({"role": "system", "content": data.system_prompt})

    def messages(self, record: Record, where: str) -> list[Message]:
        """Return the messages of a record; ``where`` names the record in errors.

        The last message is the user's or a tool's.

        Raises:
            ConfigError: for a missing column, or a format that does not suit its value.
            DataError: for messages that are not a conversation.
        """
        if (column := self._data.messages) is not None:
            if column not in record:
                raise ConfigError(
                    f"data.messages={column} must be a column, {where} has {', '.join(record)}; correct it"
                )
            return [*self._before, *self._recorded(record, column, where)]
        template = self._template
        if template.only_column == QUESTION and QUESTION not in record:
            column = next((name for name in IN_ITS_PLACE if name in record), QUESTION)
            appended = "\n\n{input}" if column == "instruction" and record.get("input") else ""
            template = Template(f"{{{column}}}{appended}")
        if (column := template.only_column) is not None and looks_like_messages(record.get(column)):
            return [*self._before, *self._recorded(record, column, where)]
        return [*self._before, {"role": "user", "content": template.fill(record, where)}]

    def _recorded(self, record: Record, name: str, where: str) -> list[Message]:
        messages = read_messages(record[name], name, where)
        if (last := messages[-1]["role"]) not in ("user", "tool"):
            raise DataError(
                f"a conversation must end with the user's message or a tool's, the last role is {last} in the column "
                f"{name!r} of {where}; leave out the messages after them"
            )
        if self._before and messages[0]["role"] == "system":
            raise DataError(
                f"a conversation must have one system message, first; {where} brings one beside data.system_prompt: "
                "empty it"
            )
        return messages


def record_of(text: str, known: Record, data: DataSection) -> dict[str, Any]:
    """Make a record for the text of a single prompt: the columns in ``known``, and the text as the one column of the
    template that ``known`` lacks. Raises ConfigError if it lacks none or several."""
    if data.messages is not None:
        return {**known, data.messages: [{"role": "user", "content": text}]}
    left = [name for name in Template(data.prompt_template).fields if name not in known]
    if len(left) != 1:
        raise ConfigError(
            f"a prompt must be what one column of data.prompt_template={data.prompt_template!r} is left for, got "
            f"{', '.join(left) or 'none'}; give the other columns, and no more, with --column name=value"
        )
    return {**known, left[0]: text}


class Template:
    """A Python format string over columns, the value of ``setting``; raises ConfigError if it is malformed, or has
    fields without a name."""

    def __init__(self, text: str, setting: str = "data.prompt_template"):
        self._text, self._setting = text, setting
        self.fields = _fields(text, setting)
        """The columns that the template uses."""

    @property
    def only_column(self) -> str | None:
        """Return the column of a template that is a single column (question for ``{question}``), else None."""
        return self.fields[0] if len(self.fields) == 1 and self._text == f"{{{self.fields[0]}}}" else None

    def fill(self, record: Record, where: str) -> str:
        """Return the text for a record; ``where`` names the record in errors.

        Raises:
            ConfigError: for a field that is not a column, or a format that does not suit its value.
            DataError: for a null field.
        """
        for name in self.fields:
            if name not in record:
                raise ConfigError(
                    f"{self._setting} uses the column {name!r}, which {where} lacks; available: "
                    f"{', '.join(record)}{_hint(record)}"
                )
            if looks_like_messages(record[name]):
                raise ConfigError(
                    f"{self._setting} {self._text!r} must be written of texts, and the column {name!r} holds a "
                    f"conversation in {where}; set data.messages={name} instead"
                )
            if record[name] is None:
                raise DataError(f"the column {name!r} of {self._setting} must have a value, got null in {where}")
        try:
            return self._text.format_map(record)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._setting} {self._text!r} must suit the columns, on {where} it fails with "
                f"{type(error).__name__}: {error}"
            ) from error


def _hint(record: Record) -> str:
    held = [name for name, value in record.items() if looks_like_messages(value)]
    if held:
        return f"; data.messages={held[0]} takes the conversation from that column"
    texts = [name for name, value in record.items() if isinstance(value, str) and not re.search(r"[][{}.:!]", name)]
    last_words = {re.split(r"[\W_]+", name.strip().lower())[-1]: name for name in reversed(texts)}
    if found := [last_words[word] for word in LIKELY if word in last_words]:
        return f"; data.prompt_template='\"{{{found[0]}}}\"' writes that column"
    return "; data.columns={question: NAME} takes the column NAME as the question"


def _fields(text: str, setting: str) -> tuple[str, ...]:
    """Return the columns that a template uses: ``"{a} {b.c} {d[0]}"`` -> a, b, d."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise ConfigError(
            f"{setting} must be a Python format string, got {text!r} ({error}); write literal braces as {{{{ and }}}}"
        ) from error
    names = [re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields]
    if any(not name or name.isdigit() for name in names):
        raise ConfigError(
            f"{setting} must name its columns, got {text!r} with a field that does not; write e.g. "
            "{question}, and literal braces as {{ and }}"
        )
    return tuple(dict.fromkeys(names))


# --- messages as data has them ---------------------------------------------------------------------------------------


def looks_like_messages(value: Any) -> bool:
    """Whether a column's value is a list of messages, each a mapping with role, or with ShareGPT's from and value."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and _is_message(m) for m in value)


def _is_message(value: Mapping[str, Any]) -> bool:
    return "role" in value or (isinstance(value.get("from"), str) and "value" in value)


def _role(message: Mapping[str, Any]) -> Any:
    return message["role"] if "role" in message else SHAREGPT.get(message["from"], message["from"])


def read_messages(value: Any, column: str, where: str) -> list[Message]:
    """Return the messages in a column of a record; ``where`` names the record in errors. Raises DataError for anything
    but a list of messages with text; the error names the type of images and other media."""
    if not looks_like_messages(value) or any(_role(message) not in ROLES for message in value):
        raise DataError(
            f"the column {column!r} must hold messages {{role, content}} with roles of {', '.join(ROLES)}, got "
            f"{value!r:.300} in {where}"
        )
    return [_message(message, column, where) for message in value]


def _message(given: Mapping[str, Any], column: str, where: str) -> Message:
    more = {key: given[key] for key in MORE_KEYS if given.get(key) is not None}  # tables have null for missing keys
    if "tool_calls" in more:
        more["tool_calls"] = [_with_arguments(call) for call in more["tool_calls"]]
    content = given.get("content") if "role" in given else given["value"]
    if content is None and more.get("tool_calls"):
        content = ""
    return {"role": _role(given), "content": _text(content, column, where), **more}


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
    """Return a tool call whose arguments, if they are JSON text, are parsed; chat templates would quote them again."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
