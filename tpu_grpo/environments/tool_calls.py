"""Reads tool calls from the text of turns, and detects which of these formats a chat template uses:

hermes        <tool_call>{"name": "add", "arguments": {"a": 47, "b": 38}}</tool_call>
llama3        {"name": "add", "parameters": {"a": 47, "b": 38}}
qwen3_coder   <tool_call><function=add><parameter=a>47</parameter></function></tool_call>, each tag on a line
python        [add(a=47, b=38), now()], or calls between marks, such as <|call|>add(47,38)<|end_call|>
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from pydantic import TypeAdapter

from tpu_grpo.config.sections import ToolFormat
from tpu_grpo.environments.actions import BadCall, ToolCall
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.short_texts import shortened

MOST_DIGITS = 4000
"""About the most digits that a whole number may have; Python prints at most 4,300 digits."""
MOST_LEVELS = 64
"""The deepest nesting of lists and objects; values nested far deeper cannot be sent between processes."""
_MOST_BITS = MOST_DIGITS * 332 // 100


def checked_call(call: ToolCall | BadCall) -> ToolCall | BadCall:
    """Convert the tuples in a call to lists; return a BadCall if a value is not JSON, too large, or nested too deep."""
    if isinstance(call, BadCall):
        return call
    try:
        return ToolCall(checked_value(call.name), checked_value(dict(call.arguments)))
    except ValueError as error:
        return BadCall(str(error))


def checked_value(value: Any, level: int = 0) -> Any:
    """Return a JSON value, ``level`` levels deep in its call, with tuples as lists; raise ValueError for what
    `checked_call` calls bad."""
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
            if value.encode(errors="replace").decode() != value:
                raise ValueError("a text must be of whole characters, got a half of a surrogate pair")
            return value
        case list() | tuple():
            return [checked_value(each, level + 1) for each in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {checked_value(key): checked_value(each, level + 1) for key, each in value.items()}
    raise ValueError(f"an argument must be text, a number, true, false, null, a list or an object, got {value!r:.80}")


OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
Calls = list[ToolCall | BadCall]
_BARE = re.compile(r"\{\s*[\"'](name|parameters|arguments|function|type)[\"']")
"""Matches the beginning of a JSON object that is a call; other text that begins with a brace is an answer."""


def read_hermes(text: str, *, ended: bool) -> tuple[str, Calls]:
    """Return the text around a turn's calls, and the calls; if the turn was cut, an unclosed call is dropped.

    A closing tag inside an argument's text is part of that text.
    """
    content, calls, at = "", [], 0
    while (opened := text.find(OPEN, at)) >= 0:
        content += text[at:opened]
        begin = opened + len(OPEN)
        call, behind = _decode(text, begin)
        closed = text.find(CLOSE, behind)
        if closed < 0:
            return content, [*calls, *_unclosed(ended, CLOSE)]
        if (rest := text[behind:closed].strip()) and not isinstance(call, BadCall):
            call = BadCall(f"the call is not JSON alone: {shortened(rest, 80)} follows it before {CLOSE}")
        calls.append(call)
        at = closed + len(CLOSE)
    return content + text[at:], calls


def read_llama3(text: str, *, ended: bool) -> tuple[str, Calls]:
    """Return the text before a turn's calls, and the calls, which semicolons separate. If the turn was cut, a last call
    that is not JSON is dropped."""
    content, calls_text = "", text
    if _BARE.match(text.lstrip()) is None:  # otherwise a tag is part of an argument
        content, tag, calls_text = text.partition(PYTHON_TAG)
        if not tag:
            return text, []
    calls, at = [], 0
    while calls_text[at:].strip():
        call, behind = _decode(calls_text, at)
        if isinstance(call, BadCall) and behind == at:  # not JSON, so its end is unknown
            return content, [*calls, *([call] if ended else [])]
        rest = calls_text[behind:].lstrip()
        calls.append(call)
        if rest and not rest.startswith(";"):
            return content, [
                *calls,
                BadCall(f"calls must be separated by semicolons: {shortened(rest, 80)} follows a call"),
            ]
        at = len(calls_text) - len(rest) + 1
    return content, calls


def _unclosed(ended: bool, closing: str) -> Calls:
    return [BadCall(f"the call is not closed: {closing} is missing")] if ended else []


def _decode(text: str, begin: int) -> tuple[ToolCall | BadCall, int]:
    """Read a call from the JSON value at ``begin``; return the call, and the index after the value (or ``begin`` if the
    text is not JSON)."""
    start = begin + len(text[begin:]) - len(text[begin:].lstrip())
    try:
        value, behind = _DECODER.raw_decode(text, start)
    except RecursionError:
        return BadCall("the call is not JSON: it is nested too deep"), begin
    except json.JSONDecodeError as error:
        return BadCall(f"the call is not JSON: {error.msg} at character {error.pos - start} of it"), begin
    except ValueError as error:  # a number of too many digits, or one that JSON does not have
        return BadCall(f"the call is not JSON: {error}"), begin
    return _call_of_json(value), behind


def _call_of_json(value: Any) -> ToolCall | BadCall:
    """Read a call from its JSON value: an object with a name, and with arguments as an object or as JSON text."""
    if not isinstance(value, dict):
        return BadCall(
            f"the call must be a JSON object with a name and arguments, got {shortened(json.dumps(value), 80)}"
        )
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return BadCall(f"the call must name a tool, its keys are {', '.join(value) or 'none'}")
    if unknown := [key for key in value if key not in ("name", "arguments", "parameters", "type", "id")]:
        return BadCall(f"the call must have a name and arguments, got {shortened(', '.join(unknown), 80)} beside them")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = _DECODER.decode(arguments)
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments must be a JSON object, got {shortened(json.dumps(arguments), 80)}")
    return ToolCall(name, arguments)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


Schemas = Mapping[str, Mapping[str, Any]]
"""The properties of each tool's parameters, by the tool's name: {"add": {"a": {"type": "integer"}}}."""
END, PARAMETER_END = "</function>", "</parameter>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_HINTS = {"integer": int, "number": int | float, "boolean": bool, "null": None, "object": dict, "array": list}
_OF_KIND: Mapping[str, TypeAdapter[Any]] = {kind: TypeAdapter(hint) for kind, hint in _HINTS.items()}
_KINDS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "object": "a JSON object",
    "array": "a JSON list",
}


def read_qwen3_coder(text: str, schemas: Schemas, *, ended: bool) -> tuple[str, Calls]:
    """Return the text around the calls of a turn, and the calls; if the turn was cut, an unclosed call is dropped."""
    return _between(text, OPEN, CLOSE, lambda body: [_xml_call(body, schemas)], ended=ended)


def _between(text: str, opening: str, closing: str, parse: Callable[[str], Calls], *, ended: bool) -> tuple[str, Calls]:
    """Return the text outside marks, and the calls inside; if ``closing`` is empty, the next opening ends a call."""
    content, calls, at = "", [], 0
    while (opened := text.find(opening, at)) >= 0:
        content += text[at:opened]
        begin = opened + len(opening)
        closed = text.find(closing or opening, begin)
        if closed < 0 and closing:
            return content, [*calls, *_unclosed(ended, closing)]
        closed = len(text) if closed < 0 else closed
        calls += parse(text[begin:closed])
        at = closed + len(closing)
    return content + text[at:], calls


def _xml_call(body: str, schemas: Schemas) -> ToolCall | BadCall:
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
        value = _xml_value(text, key, schemas.get(name, {}).get(key))
        if isinstance(value, BadCall):
            return value
        arguments[key] = value
        at = closed + len(PARAMETER_END)
    if rest := inside[at:].strip():
        return BadCall(f"the call must hold <parameter=NAME> tags alone, got {rest[:80]}")
    return ToolCall(name, arguments)


def _xml_value(text: str, key: str, schema: Any) -> Any:
    """Convert a text to the first of the schema's types that it fits; without types, return the text unchanged."""
    types = _types(schema)
    if not types:
        return text
    for kind in sorted(types, key=lambda kind: kind == "string"):  # string last, as any text fits it
        try:
            return _as(kind, text)
        except (ValueError, KeyError):  # KeyError for a kind that JSON does not have
            continue
    wanted = " or ".join(_KINDS.get(kind, kind) for kind in types)
    return BadCall(f"the parameter {key} must be {wanted}, got {text[:80]}")


def _types(schema: Any) -> list[str]:
    """Return the JSON types that a schema allows by ``type``, ``anyOf`` or ``oneOf``; empty if it has none of these."""
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
    """Convert a text to a value of a JSON type. Raises ValueError if the text does not fit."""
    if kind == "string":
        return text
    bare = text.strip()
    if kind in ("boolean", "null"):  # models write True and None, too
        bare = bare.lower().replace("none", "null")
    return _OF_KIND[kind].validate_json(bare, strict=True)


_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words, which models and templates with tojson write in place of True, False and None."""
_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


@dataclass(frozen=True)
class PythonCalls:
    """Reads calls in the format python; the opening and closing marks are empty if the template writes none."""

    schemas: Schemas
    opening: str = ""
    closing: str = ""

    def read(self, text: str, *, ended: bool) -> tuple[str, Calls]:
        """Return the text around the calls of a turn, and the calls; if the turn was cut, an unclosed call is dropped.

        Without marks, a turn consists of calls if it begins like a list of calls, or like a call of a known tool.
        """
        if not self.opening:
            return self._bare(text, ended)
        return _between(text, self.opening, self.closing, self.parse, ended=ended)

    def _bare(self, text: str, ended: bool) -> tuple[str, Calls]:
        stripped = text.strip()
        names = "|".join(re.escape(name) for name in self.schemas)
        if _LIST.match(stripped) is None and (not names or re.match(rf"({names})\s*\(", stripped) is None):
            return text, []
        calls = self.parse(stripped)
        if not ended and any(isinstance(call, BadCall) for call in calls):
            return "", []
        return "", calls

    def parse(self, source: str) -> Calls:
        """Parse Python text that is one call, several calls on separate lines, or a list of calls."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # such as one for the escape \\d in a text
                tree = ast.parse(source.strip())
            nodes = list(_listed(tree))
            return [self._call(node) for node in nodes] or [BadCall("the call is empty")]
        except SyntaxError as error:
            where = "" if error.offset is None else f" at character {error.offset} of line {error.lineno}"
            return [BadCall(f"the call is not Python: {error.msg}{where}")]
        except (ValueError, RecursionError, MemoryError) as error:  # a null byte, or too deep nesting
            return [BadCall(f"the call is not Python: {error or 'it is nested too deep'}")]

    def _call(self, node: ast.expr) -> ToolCall | BadCall:
        if not isinstance(node, ast.Call):
            return BadCall(f"the call must be written NAME(...), got {ast.unparse(node)[:80]}")
        name = ast.unparse(node.func)
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name) is None:
            return BadCall(f"the call must begin with the name of a tool, got {name[:80]}")
        order = list(self.schemas.get(name, {}))
        if name in self.schemas and len(node.args) > len(order):
            return BadCall(f"{name} takes {len(order)} arguments, got {len(node.args)}")
        arguments: dict[str, Any] = {}
        for place, value in enumerate(node.args):
            if isinstance(read := _literal(value), BadCall):
                return read
            arguments[order[place] if place < len(order) else str(place)] = read
        for keyword in node.keywords:
            if keyword.arg is None or isinstance(read := _literal(keyword.value), BadCall):
                return BadCall(f"an argument must be a value written out, got {ast.unparse(keyword.value)[:80]}")
            if keyword.arg in arguments:
                return BadCall(f"the argument {keyword.arg} is given twice")
            arguments[keyword.arg] = read
        return ToolCall(name, arguments)


def _listed(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the expressions of a parsed turn that should be calls: its statements, or the elements of its lists."""
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError(f"there are calls alone, got {ast.unparse(statement)[:80]}")
        value = statement.value
        yield from value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal argument; a BadCall for any other expression."""
    try:
        return ast.literal_eval(_Words().visit(node))
    except (ValueError, TypeError):
        return BadCall(f"an argument must be a value written out, got {ast.unparse(node)[:80]}")


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node) if node.id in _WORDS else node


CallReader = Callable[..., tuple[str, Calls]]
"""Parses the calls of a turn from its text, without thinking and end token. The keyword ``ended`` is false if the turn
was cut, maybe in the middle of a call. Returns the text around the calls, and the calls in order."""


def format_of(written: str, name: str) -> ToolFormat:
    """Detect the format in which a chat template has written a call of the tool ``name``. Raises ConfigError for an
    unknown format."""
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
    """Return the reader for a tool format other than "auto"; ``written`` is a call of the tool ``name`` as the chat
    template writes it."""
    readers: Mapping[str, Callable[[], CallReader]] = {
        "hermes": lambda: read_hermes,
        "llama3": lambda: read_llama3,
        "qwen3_coder": lambda: partial(read_qwen3_coder, schemas=schemas),
        "python": lambda: PythonCalls(schemas, *_marks(written, name)).read,
    }
    return readers[tool_format]()


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the properties of each tool's parameters by the tool's name."""
    return {
        str(tool["function"]["name"]): dict(tool["function"].get("parameters", {}).get("properties", {}))
        for tool in tools
    }


def _marks(written: str, name: str) -> tuple[str, str]:
    """Return the marks that a template writes around Python-style calls, without a list's brackets; "" for no mark."""
    before, called, rest = written.partition(f"{name}(")
    if not called:
        return "", ""
    return before.strip().removesuffix("[").strip(), rest[rest.rindex(")") + 1 :].strip().removeprefix("]").strip()
