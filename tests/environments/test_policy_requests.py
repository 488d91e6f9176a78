"""Requests that are broken in any way are refused, and nothing else happens."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tpu_grpo.environments.actions import Action, SampledTurn
from tpu_grpo.environments.policy_requests import FORMS, RefusedError, TurnRequest

NAMES = [
    *("messages", "role", "content", "name", "tool_calls", "function", "arguments", "id", "type", "tools", "n", "text"),
    *("max_tokens", "max_new_tokens", "stop", "stream", "temperature", "top_p", "top_k", "seed", "logprobs", "prompt"),
    *("echo", "token_ids", "sampling_params", "input_ids", "return_logprob"),
]
WORDS = ("user", "assistant", "tool", "system", "function", "text", "{}", '{"a": 1}', "", "\ud800", "\x00", "x" * 300)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.sampled_from(WORDS), st.text(max_size=8)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=30,
)
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/inference/v1/generate": {"token_ids": [1]},
    "/generate": {"input_ids": [1]},
}


@pytest.mark.full
@given(
    path=st.sampled_from(sorted(FORMS)),
    changed=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    cut=st.integers(0, 40),
)
def test_a_request_is_read_or_refused(path: str, changed: dict[str, Any], cut: int) -> None:
    text = json.dumps({**SOUND[path], **changed})
    for data in (text.encode(), text.encode()[:-cut], text.encode("utf-16")):
        try:
            asked = FORMS[path].read(data)
        except RefusedError as error:
            json.dumps(error.body).encode()
        else:
            assert TurnRequest.model_validate_json(asked.for_one()).for_one() == asked.for_one()


@pytest.mark.parametrize("data", [b"", b"null", b"[" * 100_000, b"\xff\xfe", b"1e999", b'{"messages": 1}'])
@pytest.mark.parametrize("path", sorted(FORMS))
def test_a_body_that_is_no_request(path: str, data: bytes) -> None:
    with pytest.raises(RefusedError):
        FORMS[path].read(data)


def test_settings_of_a_request() -> None:
    body = {
        **SOUND["/v1/chat/completions"],
        "temperature": 0,
        "top_k": -1,
        "seed": 3,
        "stop": "x",
        "max_completion_tokens": 5,
    }
    asked = FORMS["/v1/chat/completions"].read(json.dumps(body).encode())
    assert asked.sampling == {"temperature": 0.0, "top_k": 0, "seed": 3}
    assert (asked.stop, asked.max_tokens, asked.n) == (("x",), 5, 1)


@pytest.mark.parametrize(("asked", "used"), [(1e-37, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (0.7, 0.7)])
def test_a_tiny_temperature_is_greedy(asked: float, used: float) -> None:
    """At 1e-37, the log-probability of a sampled token would be -inf, which JSON does not have."""
    body = {**SOUND["/v1/chat/completions"], "temperature": asked}
    assert FORMS["/v1/chat/completions"].read(json.dumps(body).encode()).sampling == {"temperature": used}


def test_a_tools_answer_gets_the_name_of_its_call() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    body = {"messages": messages, "tools": [{"type": "function", "function": {"name": "add"}}]}
    messages = FORMS["/v1/chat/completions"].read(json.dumps(body).encode()).messages
    assert messages is not None
    user, turn, told = messages
    assert user == {"role": "user", "content": "1+"}
    assert turn["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert told == {"role": "tool", "content": "2", "name": "add"}


def with_parameter(schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": schema}}}


def test_a_tools_schema_keeps_the_order_of_its_keys() -> None:
    """A chat template writes the schema in that order; with another one, the prompt would be another."""
    tool = {"type": "function", "function": with_parameter({"description": "e", "anyOf": [True, {"type": "null"}]})}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    assert json.dumps(FORMS["/v1/chat/completions"].read(json.dumps(body).encode()).tools) == json.dumps([tool])


DEEP = '{"a": ' * 200 + "1" + "}" * 200


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tool": {}}, "tools.0.function.name"),
        ({"tool": {"name": "f", "parameters": "x"}}, "function.parameters"),
        ({"tool": {"name": "f", "parameters": {"properties": None}}}, "properties"),
        ({"tool": with_parameter({"type": 5})}, "properties.x.type.str: Input should be a valid string, got 5"),
        ({"tool": with_parameter({"anyOf": 5})}, "properties.x.anyOf: Input should be a valid array, got 5"),
        ({"tool": with_parameter({"oneOf": [{"type": 5}]})}, "properties.x.oneOf.0.*should be a valid string, got 5"),
        ({"top_k": 2**31}, "top_k: Input should be less than 2147483648"),
        ({"call": DEEP}, "nested at most 64 levels"),
        ({"call": '{"a": NaN}'}, "a number must be finite"),
        ({"call": '{"a": "\\ud800"}'}, "half of a surrogate pair"),
    ],
)
def test_what_no_template_could_write_is_refused(changed: dict[str, Any], message: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], **changed}
    body["tools"] = [{"type": "function", "function": body.pop("tool", {"name": "f", "parameters": None})}]
    if "call" in body:
        call = {"type": "function", "function": {"name": "f", "arguments": body.pop("call")}}
        body["messages"].append({"role": "assistant", "tool_calls": [call]})
    with pytest.raises(RefusedError, match=message):
        FORMS["/v1/chat/completions"].read(json.dumps(body).encode())


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OF_CHAT = [
    *(("response_format", {"type": "json_object"}), ("logit_bias", {"5": 1}), ("tool_choice", "required")),
    *(
        ("reasoning_effort", "low"),
        ("parallel_tool_calls", False),
        ("functions", [{"name": "f"}]),
        ("verbosity", "low"),
    ),
    *(("modalities", ["audio"]), ("web_search_options", {}), ("function_call", "auto"), ("audio", {"voice": "x"})),
    *(("chat_template_kwargs", {"x": 1}), ("no_such_parameter", 0), ("top_logprobs", 21), ("top_logprobs", 1)),
]
OF_BOTH = [("presence_penalty", 0.1), ("frequency_penalty", -1), ("repetition_penalty", 1.1), ("min_tokens", 2)]
OF_TEXT = [("best_of", 2), ("suffix", "x"), ("echo", True), ("logprobs", 21), ("prompt", ["a", 5]), ("prompt", [["a"]])]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(path, *each) for path, these in ((CHAT, OF_CHAT + OF_BOTH), (TEXT, OF_TEXT + OF_BOTH)) for each in these],
)
def test_a_parameter_that_cannot_be_honoured_is_refused_by_name(path: str, name: str, value: Any) -> None:
    with pytest.raises(RefusedError, match=name) as refused:
        FORMS[path].read(json.dumps({**SOUND[path], name: value}).encode())
    assert (refused.value.status, name == "prompt" or refused.value.param == name) == (400, True)
    for path in ("/inference/v1/generate", "/generate"):
        with pytest.raises(RefusedError, match=name):
            FORMS[path].read(json.dumps({**SOUND[path], "sampling_params": {name: value}}).encode())


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        (CHAT, {"response_format": {"type": "text"}, "logit_bias": {}, "presence_penalty": 0.0, "tool_choice": "auto"}),
        (
            CHAT,
            {"model": "x", "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "audio": None},
        ),
        (TEXT, {"best_of": 1, "suffix": "", "echo": False, "frequency_penalty": 0, "stream_options": None}),
        ("/generate", {"stream": False, "logprob_start_len": -1, "return_text_in_logprobs": False}),
    ],
)
def test_a_parameter_without_effect_changes_nothing(path: str, parameters: dict[str, Any]) -> None:
    sound = FORMS[path].read(json.dumps(SOUND[path]).encode())
    assert FORMS[path].read(json.dumps({**SOUND[path], **parameters}).encode()) == sound


def test_several_prompts_are_asked_one_by_one_and_counted_once() -> None:
    asked = FORMS[TEXT].read(json.dumps({"prompt": ["a", "b"], "n": 2, "logprobs": 1}).encode())
    assert [(one.text, one.index) for one in map(asked.one, range(asked.turns))] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert [TurnRequest.model_validate_json(asked.for_one(n)).text for n in range(4)] == ["a", "a", "b", "b"]
    ids = FORMS[TEXT].read(json.dumps({"prompt": [[1, 2], [3]]}).encode())
    assert [one.token_ids for one in map(ids.one, range(ids.turns))] == [(1, 2), (3,)]
    turns = [
        Action(c, c, sampled=SampledTurn((1,) * (2 + n // 2), (5,) * (n + 1), (-0.5,) * (n + 1), False))
        for n, c in enumerate("wxyz")
    ]
    answer = FORMS[TEXT].write(asked, turns, "m")
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "w"),
        (1, "x"),
        (2, "y"),
        (3, "z"),
    ]
    assert answer["usage"] == {"prompt_tokens": 2 + 3, "completion_tokens": 10, "total_tokens": 15}


def test_tokens_are_named_by_text_and_bytes() -> None:
    """A part of a character is named by its bytes, as at OpenAI; the sampled token joins the likeliest of a text."""
    likeliest = (((7, b"x", -0.1), (8, b"y", -3.0)), ((9, b"\xc3", -0.2), (8, b"y", -2.0)))
    turn = Action("", "", sampled=SampledTurn((1,), (8, 9), (-3.0, -0.2), False, (b"y", b"\xc3"), likeliest))
    asked = TurnRequest(token_ids=(1,), logprobs=True, likeliest=2)
    content = FORMS[CHAT].write(asked, [turn], "m")["choices"][0]["logprobs"]["content"]
    assert content[1] == {
        "token": "bytes:\\xc3",
        "logprob": -0.2,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "bytes:\\xc3", "logprob": -0.2, "bytes": [0xC3]},
            {"token": "y", "logprob": -2.0, "bytes": [ord("y")]},
        ],
    }
    of_text = FORMS[TEXT].write(asked, [turn], "m")["choices"][0]["logprobs"]
    assert of_text == {
        "tokens": ["y", "bytes:\\xc3"],
        "token_logprobs": [-3.0, -0.2],
        "top_logprobs": [{"x": -0.1, "y": -3.0}, {"bytes:\\xc3": -0.2, "y": -2.0}],
    }
