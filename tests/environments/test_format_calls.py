"""Tool calls are read in four formats; what cannot be read is told to the policy."""

import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from tests.environments.template_families import ADD, chat_format, ids, tokenizer, tool
from tests.goldens import compare, rows
from tpu_grpo.environments.actions import Action, BadCall, ToolCall
from tpu_grpo.environments.chat_format import ChatFormat
from tpu_grpo.environments.tool_calls import PythonCalls, checked_call, read_hermes, read_qwen3_coder

ENDS = {"llama3": "<|eot_id|>", "llama_pythonic": "<|eot_id|>"}
CALL = ToolCall("add", {"a": 47, "b": 38})


KINDS = tool("f", i="integer", n="number", b="boolean", o="object", l="array", s="string")
KINDS["function"]["parameters"]["properties"] |= {
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "free": {"description": "anything"},
}


def read(name: str, text: str, *, ended: bool = True) -> Action:
    """Read a turn of a family; one that did not end lacks its last token."""
    opened = chat_format(name, (KINDS,)) if name == "qwen3_coder" else chat_format(name)
    return opened.read(ids(name, text + (ENDS.get(name, "<|im_end|>") if ended else "")))


def tags(inside: str) -> str:
    return f"<tool_call>\n{inside}\n</tool_call>"


ADDS = tags('{"name": "add", "arguments": {"a": 47, "b": 38}}')
WRITTEN = [
    pytest.param(path, given, told, id=f"{path.stem} {given}")
    for path in sorted(Path(__file__).with_name("written_calls").glob("*.txt"))
    for given, told in rows(path)
]
"""A turn as it is written, with its ends of lines as ↵, and what is read: what is said, thought, called, and what is
wrong with a call. Values are JSON, so that whole numbers, numbers, texts and switches are told apart."""


@pytest.mark.parametrize(("path", "written", "told"), WRITTEN)
def test_turns_are_read(path: Path, written: str, told: str) -> None:
    name, text = path.stem, written.replace("↵", "\n")
    action = read(name, text)
    lines = [f"says {action.content}"] if action.content else []
    lines += [f"thinks {action.thinking}"] if action.thinking else []
    for call in action.calls:
        is_read = isinstance(call, ToolCall)
        lines.append(f"calls {call.name} {json.dumps(call.arguments)}" if is_read else f"bad: {call.problem}")
    compare(path, written, told, "\n".join(line.replace("\n", "↵") for line in lines))
    if name == "qwen2_5" and "not closed" not in told:
        assert read(name, text + ADDS).calls == (*action.calls, CALL)  # whatever was wrong before it


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen2_5", 'x<tool_call>\n{"name": "add"}'),
        ("qwen3_coder", "x<tool_call>\n<function=add>\n<parameter=a>\n1"),
        ("builtin", "x<|call|>add(1,2)"),
        ("llama3", '{"name": "add", "parameters": {'),
        ("llama_pythonic", "[add(a=1"),
    ],
)
def test_a_call_that_is_not_closed_is_no_mistake_of_a_turn_that_was_cut(name: str, cut: str) -> None:
    assert cut.replace("\n", "↵") in dict(rows(Path(__file__).with_name("written_calls") / f"{name}.txt"))
    action = read(name, cut, ended=False)
    assert action.calls == ()
    assert action.content == "x" or not cut.startswith("x")


def test_what_is_long_or_deep_is_bad() -> None:
    """A number of 4,335 digits could not be shown."""
    deep = BadCall("the call is not JSON: it is nested too deep")
    assert read("qwen2_5", tags("[" * 100_000) + ADDS).calls == (deep, CALL)
    (call,) = read("llama_pythonic", "[add(" + "(" * 10_000).calls
    assert isinstance(call, BadCall)
    assert call.problem.startswith("the call is not Python: ")
    (call,) = read("llama_pythonic", f"add(1,0x{'f' * 3600})").calls
    assert call == BadCall("a whole number must have at most 4,000 digits")


def test_a_set_format_is_read_whatever_the_template_shows() -> None:
    opened = ChatFormat(tokenizer("llama3"), (ADD,), "python")
    assert opened.read(ids("llama3", "[add(a=47, b=38)]<|eot_id|>")).calls == (CALL,)
    opened = ChatFormat(tokenizer("llama3"), (ADD,), "hermes")
    assert opened.read(ids("llama3", f"{ADDS}<|eot_id|>")).calls == (CALL,)


READERS = (
    read_hermes,
    PythonCalls({"add": {"a": {}, "b": {}}}).read,
    PythonCalls({}, "<|call|>", "<|end_call|>").read,
    lambda text, ended: read_qwen3_coder(text, {"add": {"a": {"type": "integer"}}}, ended=ended),
)
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "<|call|>"),
        *("<|end_call|>", "[add(", "a=", "1", ",", ")", "]"),
        *('{"name": "add"', '"arguments": {', "}", "}", "\n", "\0", "'"),
    ]
)


@pytest.mark.full
@given(st.lists(PIECES | st.text(max_size=3), max_size=12), st.booleans())
def test_any_text_is_read(pieces: list[str], ended: bool) -> None:
    """Whatever a policy writes becomes calls whose arguments are JSON, or problems; nothing is raised."""
    for reader in READERS:
        _, calls = reader("".join(pieces), ended=ended)
        for call in map(checked_call, calls):
            if isinstance(call, ToolCall):
                assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
            else:
                assert call.problem


@cache
def with_text_and_number(name: str) -> ChatFormat:
    return ChatFormat(tokenizer(name), (tool("f", s="string", i="integer"),))


@given(st.text().filter(lambda text: "</think>" not in text), st.integers(min_value=-(10**20)))
@example("<think>", 0)
@example("<|python_tag|>", 0)
@example("</tool_call>", 0)
@settings(deadline=None)
def test_what_the_templates_write_is_read_back(text: str, number: int) -> None:
    """The arguments of a call that a template writes are those that are read, in every format.

    Two formats have no way to write what closes a call, or an argument of it, within a text.
    """
    closing = {"qwen3_coder": ("</parameter>", "</function>", "</tool_call>"), "builtin": ("<|end_call|>",)}
    call = {"function": {"name": "f", "arguments": {"s": text, "i": number}}}
    messages: list[Any] = [{"role": "user", "content": "q"}]
    spoken: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools: list[Any] = [tool("f", s="string", i="integer")]
    for name in ("qwen2_5", "llama3", "qwen3_coder", "llama_pythonic", "builtin"):
        if any(mark in text for mark in closing.get(name, ())):
            continue
        own = tokenizer(name)
        whole = str(own.apply_chat_template([*messages, spoken], tools=tools, tokenize=False))
        begin = str(own.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))
        turn = ids(name, whole[len(begin) :].removesuffix("\n"))
        assert with_text_and_number(name).read(turn).calls == (ToolCall("f", {"s": text, "i": number}),)


def test_texts_of_a_turn() -> None:
    action = read("qwen3", f"<think>\nhm\n</think>\n\nhi {tags('x')}")
    assert action.text == "<think>\nhm\n</think>\n\nhi <tool_call>\nx\n</tool_call>"
    assert (action.content, action.thinking) == ("hi", "hm")
    assert chat_format("qwen3", tools=()).read([]) == Action("", "")
    call = '{"name": "add", "parameters": {"a": 47, "b": 38}}'
    assert read("llama3", f"So: <|python_tag|>{call}").text == f"So: {call}"
    assert read("builtin", "so<|call|>add(47,38)<|end_call|>").text == "soadd(47,38)"


def test_what_is_nested_too_deep_for_another_process_is_bad() -> None:
    """JSON is read some 1,000 levels deep, and pickle writes 700."""
    deep = {level: f"{'[' * level}{']' * level}" for level in (64, 65, 800)}
    call = {level: f'{{"name": "say", "arguments": {{"text": {text}}}}}' for level, text in deep.items()}
    for level in (65, 800):
        assert read("qwen2_5", tags(call[level])).calls == (BadCall("arguments must be nested at most 64 levels deep"),)
    assert pickle.loads(pickle.dumps(read("qwen2_5", tags(call[64])))).calls[0].name == "say"
