"""Which way a model writes its tool calls: as the config says, or as its chat template shows."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from tpu_grpo.config.sections import ToolFormat
from tpu_grpo.environments.dialects.json_calls import Calls, read_hermes, read_llama3
from tpu_grpo.environments.dialects.python_calls import PythonCalls
from tpu_grpo.environments.dialects.xml_calls import Schemas, read_qwen3_coder
from tpu_grpo.records.errors import ConfigError


class CallReader(Protocol):
    """Reads the calls of a turn."""

    def __call__(self, text: str, *, ended: bool) -> tuple[str, Calls]:
        """Return the text around the calls, and the calls in order.

        Args:
            text: the turn without its thinking and the token that ended it.
            ended: whether the turn ended by itself; if it was cut, so may be its last call.
        """
        ...


def format_of(written: str, name: str) -> ToolFormat:
    """Tell the format of a call of the tool ``name``, as a chat template has written it.

    Raises:
        ConfigError: if it is none of the formats.
    """
    if f"<function={name}>" in written:
        return "qwen3_coder"
    if re.search(rf'<tool_call>\s*\{{"name": ?"{re.escape(name)}"', written):
        return "hermes"
    if re.match(rf'\s*(<\|python_tag\|>)?\{{"name": ?"{re.escape(name)}", ?"parameters"', written):
        return "llama3"
    if f"{name}(" in written:
        return "python"
    raise ConfigError(
        f"environment.tool_format=auto needs a chat template that writes tool calls as hermes, llama3, qwen3_coder or "
        f"python, this one writes {written!r:.120}; set environment.tool_format to what the model writes"
    )


def reader(tool_format: ToolFormat, written: str, name: str, schemas: Schemas) -> CallReader:
    """Return what reads calls in a format, which is not "auto".

    Args:
        tool_format: which one.
        written: a call of the tool ``name`` as the chat template writes it.
        name: of a tool.
        schemas: what the tools take.
    """
    readers: Mapping[str, Callable[[], CallReader]] = {
        "hermes": lambda: read_hermes,
        "llama3": lambda: read_llama3,
        "qwen3_coder": lambda: partial(read_qwen3_coder, schemas=schemas),
        "python": lambda: PythonCalls(schemas, *_marks(written, name)).read,
    }
    return readers[tool_format]()


def schemas_of(tools: list[dict[str, Any]]) -> Schemas:
    """Return the properties of each tool's parameters by the tool's name."""
    return {
        str(tool["function"]["name"]): dict(tool["function"].get("parameters", {}).get("properties", {}))
        for tool in tools
    }


def _marks(written: str, name: str) -> tuple[str, str]:
    """Return what a template writes around Python-style calls beside brackets: "" and "" if nothing."""
    before, called, rest = written.partition(f"{name}(")
    if not called:
        return "", ""
    return before.strip().removesuffix("[").strip(), rest[rest.rindex(")") + 1 :].strip().removeprefix("]").strip()
