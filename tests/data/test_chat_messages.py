"""Conversations as data has them: a column of messages, parts of text, tools, and answers at the end."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import DataSection
from tpu_grpo.data.chat_messages import Conversation, read_messages
from tpu_grpo.data.rendering import PromptRenderer

USER = {"role": "user", "content": "2+3?"}


def render(tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], **settings: Any) -> str:
    return PromptRenderer(DataSection(**settings), tokenizer).render(record, "record 0").text


def test_a_column_prompt_is_taken_where_there_is_no_question(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = "<s>user:2+3?</s><s>assistant:"
    assert render(tokenizer, {"prompt": "2+3?", "answer": 5}) == expected
    assert render(tokenizer, {"prompt": [USER], "answer": 5}) == expected
    assert render(tokenizer, {"question": "2+3?", "prompt": "other"}) == expected
    assert render(tokenizer, {"chat": [USER]}, prompt_template="{chat}") == expected
    system = {"role": "system", "content": "Add."}
    assert render(tokenizer, {"prompt": [system, USER]}) == f"<s>system:Add.</s>{expected}"


def test_parts_of_text_are_joined(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]
    assert render(tokenizer, {"prompt": [{"role": "user", "content": parts}]}) == "<s>user:2+3?</s><s>assistant:"


def test_tools_keep_what_templates_need(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    given = [
        {"role": "user", "content": "2+3?", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
    ]
    assert read_messages(given, "chat", "record 0") == [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
    ]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    arguments = json.dumps({"a": 2, "b": 3})
    assert render(tokenizer, {"chat": given}, messages="chat") == f"user:2+3?;assistant:add{arguments};tool:5;"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": [USER]}, "2+3?"),
        ({"problem": "2+3?", "solution": "5"}, "2+3?"),
        ({"problem": "2+3?", "messages": [USER, {"role": "assistant", "content": "5"}]}, "2+3?"),
        ({"instruction": "Add.", "input": "2 3", "output": "5"}, "Add.\n\n2 3"),
        ({"instruction": "Add 2 and 3.", "input": "", "output": "5"}, "Add 2 and 3."),
        ({"conversations": [{"from": "human", "value": "2+3?"}]}, "2+3?"),
        ({"data_source": "gsm8k", "prompt": [USER], "reward_model": {"ground_truth": "5"}}, "2+3?"),
        ({"question": "2+3?", "prompt": "no", "problem": "no"}, "2+3?"),
    ],
    ids=[
        "messages",
        "problem",
        "open-r1",
        "instruction and input",
        "instruction",
        "ShareGPT",
        "verl",
        "a question goes first",
    ],
)
def test_layouts_of_other_trainers_are_recognised(record: dict[str, Any], said: str) -> None:
    assert Conversation(DataSection()).messages(record, "record 0") == [{"role": "user", "content": said}]


def test_sharegpts_conversations_have_roles_of_their_own() -> None:
    names = ("system", "human", "gpt", "observation")
    turns = [{"from": name, "value": str(number)} for number, name in enumerate(names)]
    found = Conversation(DataSection()).messages({"conversations": turns}, "record 0")
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool"]
    assert [message["content"] for message in found] == ["0", "1", "2", "3"]
