"""A record becomes the conversation that is put to the model, a list of {role, content}.

    system     data.system_prompt
    user       each of data.examples, by data.prompt_template
    assistant  and its answer, by data.example_template
    user       the record itself, by data.prompt_template

With data.messages, what that column of the record holds comes after the system prompt and the examples instead.
"""

import re
import string
from collections.abc import Mapping
from typing import Any

from tpu_grpo.config import DataSection
from tpu_grpo.errors import ConfigError, DataError

Record = Mapping[str, Any]
Message = dict[str, str]
ROLES = ("system", "user", "assistant")


class Conversation:
    """A Conversation writes the messages of records by the templates of the data section.

    Raises:
        ConfigError: for a template that is malformed, or examples that lack a column.
    """

    def __init__(self, data: DataSection):
        self._data = data
        self._question = Template("data.prompt_template", data.prompt_template)
        answer = Template("data.example_template", data.example_template)
        self._before: list[Message] = []
        if data.system_prompt:
            self._before.append({"role": "system", "content": data.system_prompt})
        for index, example in enumerate(data.examples):
            where = f"data.examples.{index}"
            self._before.append({"role": "user", "content": self._question.fill(example, where)})
            self._before.append({"role": "assistant", "content": answer.fill(example, where)})

    @property
    def before(self) -> int:
        """Count the messages that stand before those of every record."""
        return len(self._before)

    def messages(self, record: Record, where: str) -> list[Message]:
        """Return the messages of a record; the last one is the user's. ``where`` names the record in errors."""
        if (column := self._data.messages) is not None:
            return [*self._before, *self._recorded(record, column, where)]
        return [*self._before, {"role": "user", "content": self._question.fill(record, where)}]

    def _recorded(self, record: Record, name: str, where: str) -> list[Message]:
        if name not in record:
            raise ConfigError(f"data.messages={name} must be a column, {where} has {', '.join(record)}; correct it")
        messages = record[name]
        fits = isinstance(messages, list) and all(
            isinstance(m, Mapping) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages
        )
        if not fits or not messages or messages[-1]["role"] != "user":
            raise DataError(
                f"the column {name!r} must hold messages {{role, content}} with roles of {', '.join(ROLES)}, the last "
                f"the user's, got {messages!r} in {where}"
            )
        if self._before and messages[0]["role"] == "system":
            raise DataError(
                f"a conversation must have one system message, first; {where} brings one beside data.system_prompt or "
                "data.examples: empty these"
            )
        return [{"role": m["role"], "content": m["content"]} for m in messages]


class Template:
    """A Template is a Python format string over columns, checked once.

    Raises:
        ConfigError: for one that is malformed, or has fields without a name.
    """

    def __init__(self, setting: str, text: str):
        self._setting = setting
        self._text = text
        self._fields = _fields(setting, text)

    def fill(self, record: Record, where: str) -> str:
        """Return the text for a record, which errors call ``where``.

        Raises:
            ConfigError: for a field that is not a column, or a format that does not suit its value.
            DataError: for a null field.
        """
        for name in self._fields:
            if name not in record:
                raise ConfigError(
                    f"{self._setting} uses the column {name!r}, which {where} lacks; available: {', '.join(record)}"
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


def _fields(setting: str, text: str) -> tuple[str, ...]:
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
            f"{setting} must name its columns, got {text!r} with a field that does not; write e.g. {{question}}, and "
            "literal braces as {{ and }}"
        )
    return tuple(dict.fromkeys(names))
