"""Chat templates that a conversation cannot be had with are refused at the start, with what is wrong."""

from typing import Any

import pytest

from tests.environments.template_families import ADD, FAMILIES, GEMMA, QWEN, QWEN_TAGS, TEMPLATES, Family, build
from tpu_grpo.environments.chat_format import ChatFormat
from tpu_grpo.models.tokenizers import build_byte_tokenizer
from tpu_grpo.records.errors import ConfigError, DataError


def open_changed(family: str, *changes: tuple[str, str], tools: Any = (ADD,), **rest: Any) -> ChatFormat:
    template = (TEMPLATES / f"{family}.jinja").read_text()
    for old, new in changes:
        assert old in template
        template = template.replace(old, new)
    return ChatFormat(build(FAMILIES[family], template), tools, **rest)


def test_no_chat_template() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template, this one has none; use"):
        ChatFormat(build(FAMILIES["qwen3"], None), ())


def test_tools_that_are_not_shown() -> None:
    with pytest.raises(ConfigError, match="needs a chat template that shows them.*writes the same without; take"):
        ChatFormat(build_byte_tokenizer(), (ADD,))
    ChatFormat(build_byte_tokenizer(), ())


def test_a_role_that_is_refused() -> None:
    shows_tools = ("{{- bos_token -}}", "{{- bos_token ~ (tools | tojson if tools) -}}")
    with pytest.raises(ConfigError, match="must accept the roles user, assistant, tool.*take turns, got tool; take"):
        open_changed("gemma2", shows_tools)
    once = ("{{- bos_token -}}", "{{- raise_exception('one question') if messages | length > 2 else bos_token -}}")
    with pytest.raises(ConfigError, match="must accept the roles user, assistant, user.*it says: one question; take"):
        open_changed("gemma2", once, tools=())


def test_answers_that_are_left_out() -> None:
    silent = ("{{- '\\n<tool_response>\\n' ~ message.content", "{{- '\\n<tool_response>\\n'")
    with pytest.raises(ConfigError, match="must write the answers of the role tool after the token <.im_end.>"):
        open_changed("qwen2_5", silent)


def test_calls_in_no_known_way() -> None:
    own = ('<tool_call>\\n{"name": "\' ~ call.name ~ \'", "arguments": \'', "[TOOL_CALLS]' ~ call.name ~ '[ARGS]'")
    with pytest.raises(ConfigError, match=r"tool_format=auto needs.*writes '\[TOOL_CALLS\]add\[ARGS\].*; set environ"):
        open_changed("qwen2_5", own)
    open_changed("qwen2_5", own, tool_format="hermes")


def test_a_past_that_changes_in_another_way() -> None:
    # the tools move to the last question, as in some templates
    moves = ("{{- '\\n' ~ message.content", "{{- '\\n' ~ ('first ' if loop.first and not loop.last) ~ message.content")
    with pytest.raises(
        ConfigError, match="must leave what was said as it is when a message of the role user follows.*'f"
    ):
        open_changed("qwen2_5", moves, tools=())
    # thinking stays for one answer, and goes with the next
    later = ("seen.question == 0 and", "messages | length < 4 and")
    with pytest.raises(ConfigError, match="must leave what was said as it is when a message of the role tool follows"):
        open_changed("qwen3", later)


def test_a_turn_without_a_special_token_at_its_end() -> None:
    family = Family(tuple(t for t in GEMMA if t != "<end_of_turn>"), (), "<bos>", "<eos>", "<pad>")
    plain = build(family, (TEMPLATES / "gemma2.jinja").read_text())
    with pytest.raises(ConfigError, match="must end the policy's turns with a special token"):
        ChatFormat(plain, ())


def test_thinking_that_is_dropped_and_no_token() -> None:
    plain = build(
        Family(QWEN, QWEN_TAGS[:4], None, "<|im_end|>", "<|endoftext|>"), (TEMPLATES / "qwen3.jinja").read_text()
    )
    with pytest.raises(ConfigError, match="whose </think> is one token, this one has 6; take"):
        ChatFormat(plain, ())
    ChatFormat(plain, (ADD,))  # a tool's answer leaves it


def test_prompts_that_cannot_begin() -> None:
    opened = open_changed("qwen2_5")
    with pytest.raises(ConfigError, match="must have a user message, because what reset returns is put after it"):
        opened.first([{"role": "system", "content": "S"}], "O")
    with pytest.raises(DataError, match=r"must not hold the pad token, got '<\|endoftext\|>'"):
        opened.first([{"role": "user", "content": "<|endoftext|>"}], None)
    with pytest.raises(ConfigError, match="must accept the roles system, user.*take turns, got system; take"):
        open_changed("gemma2", tools=()).first(
            [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], None
        )
