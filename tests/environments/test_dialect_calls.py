"""Tool calls are read in four formats; what cannot be read is told to the policy."""

import json
import pickle
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.environments.template_families import ADD, dialect, ids, tokenizer, tool
from tpu_grpo.environments.actions import Action, BadCall, ToolCall
from tpu_grpo.environments.chat_dialect import Dialect
from tpu_grpo.environments.tool_calls import PythonCalls, checked_call, read_hermes, read_qwen3_coder

ENDS = {"llama3": "<|eot_id|>", "llama_pythonic": "<|eot_id|>"}
CALL = ToolCall("add", {"a": 47, "b": 38})


def read(name: str, text: str, *, ended: bool = True) -> Action:
    """Read a turn of a family; one that did not end lacks its last token."""
    return dialect(name).read(ids(name, text + (ENDS.get(name, "<|im_end|>") if ended else "")))


def problem(name: str, text: str) -> str:
    """Return what is wrong with the last call of a turn."""
    call = read(name, text).calls[-1]
    assert isinstance(call, BadCall)
    return call.problem


def tags(inside: str) -> str:
    return f"<tool_call>\n{inside}\n</tool_call>"


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "add", "arguments": {"a": 47, "b": 38}}',
        '{"arguments":{"a":47,"b":38},"name":"add"}',
        '{"name": "add", "arguments": "{\\"a\\": 47, \\"b\\": 38}"}',
        '{"name": "add", "parameters": {"a": 47, "b": 38}}',
        '{"type": "function", "name": "add", "arguments": {"a": 47, "b": 38}}',
    ],
)
def test_hermes(inside: str) -> None:
    assert read("qwen2_5", tags(inside)).calls == (CALL,)
    action = read("qwen2_5", f"I add.\n{tags(inside)}\nand {tags(inside)}")
    assert action.calls == (CALL, CALL)
    assert action.content == "I add.\n\nand"


def test_a_closing_tag_in_an_argument_is_text() -> None:
    call = json.dumps({"name": "say", "arguments": {"text": "a</tool_call>b"}})
    assert read("qwen2_5", tags(call)).calls == (ToolCall("say", {"text": "a</tool_call>b"}),)


def test_a_call_without_arguments() -> None:
    assert read("qwen2_5", tags('{"name": "now"}')).calls == (ToolCall("now", {}),)


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (
            '{"name": "add", "arguments": {"a": 47, "b": }}',
            "the call is not JSON: Expecting value at character 44 of it",
        ),
        ("add(47, 38)", "the call is not JSON: Expecting value at character 0 of it"),
        ("", "the call is not JSON: Expecting value at character 0 of it"),
        ('{"name": "add", "arguments": {"a": NaN}}', "the call is not JSON: NaN is no number of JSON"),
        ("[" * 100_000, "the call is not JSON: it is nested too deep"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "a number must be finite, got inf"),
        (
            '{"name": "say", "arguments": {"text": "\\ud800"}}',
            "a text must be of whole characters, got a half of a surr",
        ),
        ("[1, 2]", "the call must be a JSON object with a name and arguments, got [1, 2]"),
        ('{"arguments": {"a": 1}}', "the call must name a tool, its keys are arguments"),
        ('{"name": 3, "arguments": {}}', "the call must name a tool, its keys are name, arguments"),
        ("{}", "the call must name a tool, its keys are none"),
        ('{"name": "add", "a": 1}', "the call must have a name and arguments, got a beside them"),
        ('{"name": "add", "arguments": [1, 2]}', "the arguments must be a JSON object, got [1, 2]"),
        ('{"name": "add", "arguments": "a=1"}', 'the arguments must be a JSON object, got "a=1"'),
        ('{"name": "add", "arguments": null}', "the arguments must be a JSON object, got null"),
        (
            '{"name": "now"} {"name": "now"}',
            'the call is not JSON alone: {"name": "now"} follows it before </tool_call>',
        ),
    ],
)
def test_bad_hermes(inside: str, said: str) -> None:
    assert problem("qwen2_5", tags(inside)).startswith(said)
    good = tags('{"name": "add", "arguments": {"a": 47, "b": 38}}')
    assert read("qwen2_5", tags(inside) + good).calls[1:] == (CALL,)


def test_a_call_that_is_not_closed_is_bad_unless_the_turn_was_cut() -> None:
    unclosed = {
        "qwen2_5": '<tool_call>\n{"name": "add"}',
        "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1",
        "builtin": "<|call|>add(1,2)",
    }
    for name, text in unclosed.items():
        assert problem(name, f"x{text}").startswith("the call is not closed: <")
        assert read(name, f"x{text}", ended=False).calls == ()
        assert read(name, f"x{text}", ended=False).content == "x"
    assert problem("llama3", '{"name": "add", "parameters": {').startswith("the call is not JSON: Expecting")
    assert read("llama3", '{"name": "add", "parameters": {', ended=False).calls == ()
    assert problem("llama_pythonic", "[add(a=1").startswith("the call is not Python: ")
    assert read("llama_pythonic", "[add(a=1", ended=False).calls == ()


def test_calls_within_thinking_are_thoughts() -> None:
    call = tags('{"name": "add", "arguments": {"a": 47, "b": 38}}')
    action = read("qwen3", f"<think>\nshall I {call}?\n</think>\n\nYes. {call}")
    assert action.calls == (CALL,)
    assert action.content == "Yes."
    assert action.thinking == f"shall I {call}?"
    assert read("qwen3", f"<think>\n{call}").calls == ()


def test_llama3() -> None:
    call = '{"name": "add", "parameters": {"a": 47, "b": 38}}'
    assert read("llama3", call).calls == (CALL,)
    assert read("llama3", f"<|python_tag|>{call}").calls == (CALL,)
    assert read("llama3", f"{call}; {call};").calls == (CALL, CALL)
    action = read("llama3", f"So: <|python_tag|>{call}")
    assert (action.calls, action.content, action.text) == ((CALL,), "So:", f"So: {call}")
    assert read("llama3", '{"name": "add", "parameters": "{\\"a\\": 47, \\"b\\": 38}"}').calls == (CALL,)


@pytest.mark.parametrize("text", ['{"answer": 5}', "{1, 2}", f"The call is {json.dumps({'name': 'add'})}", "85"])
def test_llama3_answers_that_are_no_calls(text: str) -> None:
    assert read("llama3", text).calls == ()
    assert read("llama3", text).content == text


def test_bad_llama3() -> None:
    not_json = "the call is not JSON: Expecting"
    assert problem("llama3", '{"name": "add", "parameters": {47}}').startswith(f"{not_json} property")
    assert problem("llama3", "<|python_tag|>add.call(a=1)").startswith(f"{not_json} value")
    more = '{"name": "add"} and more'
    assert problem("llama3", more) == "calls must be separated by semicolons: and more follows a call"
    assert read("llama3", more).calls[0] == ToolCall("add", {})


KINDS = tool("f", i="integer", n="number", b="boolean", o="object", l="array", s="string")
KINDS["function"]["parameters"]["properties"] |= {
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "free": {"description": "anything"},
}


def coder(parameters: str, name: str = "f") -> ToolCall | BadCall:
    """Read an XML call of a tool with parameters of all kinds."""
    opened = Dialect(tokenizer("qwen3_coder"), (KINDS,))
    calls = opened.read(ids("qwen3_coder", tags(f"<function={name}>\n{parameters}\n</function>") + "<|im_end|>")).calls
    assert len(calls) == 1
    return calls[0]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("i", "\n47\n", 47),
        ("i", "47", 47),
        ("n", "\n4.5\n", 4.5),
        ("n", "\n4\n", 4),
        ("b", "\nTrue\n", True),
        ("b", "\nfalse\n", False),
        ("o", '\n{"a": [1]}\n', {"a": [1]}),
        ("l", "\n[1, null]\n", [1, None]),
        ("s", "\n 47 \n", " 47 "),
        ("s", "\n\na\n\nb\n\n", "\na\n\nb\n"),
        ("s", "\n<b>&amp;</b>\n", "<b>&amp;</b>"),
        ("maybe", "\nnull\n", None),
        ("maybe", "\n3\n", 3),
        ("either", "\n3\n", 3),
        ("either", "\nx\n", "x"),
        ("free", "\n47\n", "47"),
        ("unknown", "\n47\n", "47"),
    ],
)
def test_qwen3_coder(key: str, text: str, value: Any) -> None:
    call = coder(f"<parameter={key}>{text}</parameter>")
    assert call == ToolCall("f", {key: value})
    assert isinstance(call, ToolCall)
    assert type(call.arguments[key]) is type(value)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("<parameter=i>\nx\n</parameter>", "the parameter i must be an integer, got x"),
        ("<parameter=i>\n4.5\n</parameter>", "the parameter i must be an integer, got 4.5"),
        ("<parameter=b>\n1\n</parameter>", "the parameter b must be true or false, got 1"),
        ("<parameter=o>\n[1]\n</parameter>", "the parameter o must be a JSON object, got [1]"),
        ("<parameter=l>\n1,2\n</parameter>", "the parameter l must be a JSON list, got 1,2"),
        ("<parameter=maybe>\nx\n</parameter>", "the parameter maybe must be an integer or null, got x"),
        ("<parameter=n>\nnan\n</parameter>", "the parameter n must be a number, got nan"),
        ("<parameter=i>\n1\n", "the parameter i is not closed: </parameter> is missing"),
        ("<parameter=i>1</parameter><parameter=i>2</parameter>", "the parameter i is given twice"),
        ("i=1", "the call must hold <parameter=NAME> tags alone, got i=1"),
    ],
)
def test_bad_qwen3_coder(parameters: str, said: str) -> None:
    assert coder(parameters) == BadCall(said)


def test_qwen3_coder_needs_its_tags() -> None:
    assert coder("", name="") == BadCall("the call must begin with <function=NAME>")
    assert problem("qwen3_coder", tags('{"name": "add"}')) == "the call must begin with <function=NAME>"
    assert problem("qwen3_coder", tags("<function=add>")) == "the call is not closed: </function> is missing"
    assert coder("<parameter=x>\n1\n</parameter>", name="g") == ToolCall("g", {"x": "1"})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[add(a=47, b=38)]", (CALL,)),
        ("[add(47, 38)]", (CALL,)),
        ("[add(47, b=38), add(b=38, a=47)]", (CALL, CALL)),
        ("add(47,38)", (CALL,)),
        ("add(47,38)\nadd(47,38)", (CALL, CALL)),
        ("add(47,38), add(47,38)", (CALL, CALL)),
        ('[say(text="a, [b](c)\\n")]', (ToolCall("say", {"text": "a, [b](c)\n"}),)),
        ("[say('it''s')]", (ToolCall("say", {"text": "its"}),)),
        ("[f(a=-1, b=[1, {'x': (2, None)}], c=true, d=False, e=null)]", None),
        ("[other(1, x=2)]", (ToolCall("other", {"0": 1, "x": 2}),)),
        ("[a.b(x=1)]", (ToolCall("a.b", {"x": 1}),)),
    ],
)
def test_python(text: str, calls: tuple[ToolCall, ...] | None) -> None:
    wanted = (ToolCall("f", {"a": -1, "b": [1, {"x": [2, None]}], "c": True, "d": False, "e": None}),)
    assert read("llama_pythonic", text).calls == (wanted if calls is None else calls)


@pytest.mark.parametrize("text", ["85", "[1, 2]", "print(x)", "It is [add(1,2)]", "The add(1,2) is 3"])
def test_python_answers_that_are_no_calls(text: str) -> None:
    assert read("llama_pythonic", text).calls == ()
    assert read("llama_pythonic", text).content == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("add(47 38)", "the call is not Python: invalid syntax"),
        ("add(047,38)", "the call is not Python: leading zeros in decimal integer literals are not permitted"),
        ("add(47,x)", "an argument must be a value written out, got x"),
        ("add(47,3*8)", "an argument must be a value written out, got 3 * 8"),
        ("add(**{'a': 1})", "an argument must be a value written out, got {'a': 1}"),
        (
            "add(__import__('os').system('x'))",
            "an argument must be a value written out, got __import__('os').system('x')",
        ),
        ("add(1,2,3)", "add takes 2 arguments, got 3"),
        ("add(1,a=2)", "the argument a is given twice"),
        (f"add(1,0x{'f' * 3600})", "a whole number must have at most 4,000 digits"),  # 4,335, which could not be shown
        ("add(1,2) + 1", "the call must be written NAME(...), got add(1, 2) + 1"),
        ("add(1,2)(3)", "the call must begin with the name of a tool, got add(1, 2)"),
        ("add(1, b'x')", "an argument must be text, a number, true, false, null, a list or an object, got b'x'"),
        ("add(1, {1: 2})", "an argument must be text, a number, true, false, null, a list or an object, got {1: 2}"),
        ("x = add(1,2)", None),
        ("add(1,2)\nx = 3", "the call is not Python: there are calls alone, got x = 3"),
        ("[add(" + "(" * 10_000, "the call is not Python: "),
    ],
)
def test_bad_python(text: str, said: str | None) -> None:
    if said is None:
        assert read("llama_pythonic", text).calls == ()
    else:
        assert problem("llama_pythonic", text).startswith(said)


def test_builtin() -> None:
    action = read("builtin", "so<|call|>add(47,38)<|end_call|><|call|>add(b=38,a=47)<|end_call|>")
    assert action.calls == (CALL, CALL)
    assert (action.content, action.text) == ("so", "soadd(47,38)add(b=38,a=47)")
    assert problem("builtin", "<|call|><|end_call|>") == "the call is empty"
    assert problem("builtin", "<|call|>47+38<|end_call|>") == "the call must be written NAME(...), got 47 + 38"
    assert read("builtin", "add(47,38)").calls == ()


def test_a_set_format_is_read_whatever_the_template_shows() -> None:
    opened = Dialect(tokenizer("llama3"), (ADD,), "python")
    assert opened.read(ids("llama3", "[add(a=47, b=38)]<|eot_id|>")).calls == (CALL,)
    opened = Dialect(tokenizer("llama3"), (ADD,), "hermes")
    call = tags('{"name": "add", "arguments": {"a": 47, "b": 38}}')
    assert opened.read(ids("llama3", f"{call}<|eot_id|>")).calls == (CALL,)


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
def with_text_and_number(name: str) -> Dialect:
    return Dialect(tokenizer(name), (tool("f", s="string", i="integer"),))


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
    spoken = {"role": "assistant", "content": "", "tool_calls": [call]}
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
    assert dialect("qwen3", tools=()).read([]) == Action("", "")


def test_what_is_nested_too_deep_for_another_process_is_bad() -> None:
    """JSON is read some 1,000 levels deep, and pickle writes 700."""
    deep = {level: f"{'[' * level}{']' * level}" for level in (64, 65, 800)}
    call = {level: f'{{"name": "say", "arguments": {{"text": {text}}}}}' for level, text in deep.items()}
    assert problem("qwen2_5", tags(call[800])) == "arguments must be nested at most 64 levels deep"
    assert problem("qwen2_5", tags(call[65])) == "arguments must be nested at most 64 levels deep"
    assert pickle.loads(pickle.dumps(read("qwen2_5", tags(call[64])))).calls[0].name == "say"
