"""Conversations as data has them: a column of messages, parts of text, tools, and answers at the end."""

import json
import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import DataSection
from tpu_grpo.data.chat_messages import Conversation, read_messages
from tpu_grpo.data.rendering import PromptRenderer
from tpu_grpo.records.errors import ConfigError, DataError

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


def test_a_conversation_is_not_written_into_a_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(
        ConfigError, match="the column 'prompt' holds a conversation in record 0; set data.messages=prom"
    ):
        render(tokenizer, {"prompt": [USER]}, prompt_template="Q: {prompt}")
    with pytest.raises(
        ConfigError, match="uses the column 'question', .*data.messages=chat takes the conversation from"
    ):
        render(tokenizer, {"chat": [USER]})


def test_parts_of_text_are_joined(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]
    assert render(tokenizer, {"prompt": [{"role": "user", "content": parts}]}) == "<s>user:2+3?</s><s>assistant:"


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_what_is_no_text_is_refused_in_words(tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: "x"}]
    with pytest.raises(
        DataError, match=f"a prompt must be text, .*of the type '{kind}' in the column 'prompt' of record"
    ):
        render(tokenizer, {"prompt": [{"role": "user", "content": content}]})
    with pytest.raises(DataError, match="whose content is a text or a list of parts"):
        render(tokenizer, {"prompt": [{"role": "user", "content": {"image": b""}}]})


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
    turns[2]["from"] = "function_call"
    with pytest.raises(DataError, match="must hold messages .* with roles of system, user, assistant, tool"):
        Conversation(DataSection()).messages({"conversations": turns}, "record 0")


@pytest.mark.parametrize(
    ("record", "remedy"),
    [
        ({"text": "2+3?", "score": 1}, "data.prompt_template='\"{text}\"' writes that column"),
        ({"Answer": "5", "Question ": "2+3?"}, "data.prompt_template='\"{Question }\"' writes that column"),
        ({"id": "a", "label": "0", "ctx_a": "A", "ctx": "A b"}, "data.prompt_template='\"{ctx}\"' writes that column"),
        ({"gold": "5", "user_query": "2+3?"}, "data.prompt_template='\"{user_query}\"' writes that column"),
        ({"Answer": "5", "level": "1"}, "data.columns={question: NAME} takes the column NAME as the question"),
        ({"Answer": "5", "a.question": "x"}, "data.columns={question: NAME} takes the column NAME as the question"),
    ],
)
def test_a_layout_that_is_not_known_is_answered_with_the_line_to_add(record: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"available: {', '.join(record)}; {re.escape(remedy)}$"):
        Conversation(DataSection()).messages(record, "record 0")
