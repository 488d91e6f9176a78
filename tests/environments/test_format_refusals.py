"""Chat templates that a conversation cannot be had with are refused at the start, with what is wrong."""

from pathlib import Path
from typing import Any

import pytest

from tests.environments.template_families import ADD, FAMILIES, GEMMA, QWEN, QWEN_TAGS, TEMPLATES, Family, build
from tests.goldens import cases, compare, rows
from tpu_grpo.environments.chat_format import ChatFormat
from tpu_grpo.models.tokenizers import build_byte_tokenizer
from tpu_grpo.records.errors import ConfigError, DataError

REFUSED = Path(__file__).with_name("refused_templates.txt")


def open_changed(given: str, **rest: Any) -> ChatFormat:
    """Open the format of a family whose template is changed: ``FAMILY [with tools] [⇒ OLD ⇒ NEW]``."""
    name, _, change = given.partition(" ⇒ ")
    family, _, tools = name.partition(" ")
    old, _, new = change.partition(" ⇒ ")
    template = (TEMPLATES / f"{family}.jinja").read_text()
    assert old in template
    return ChatFormat(build(FAMILIES[family], template.replace(old, new)), (ADD,) if tools else (), **rest)


@pytest.mark.parametrize(("given", "told"), cases(REFUSED))
def test_templates_that_are_refused(given: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_changed(given)
    compare(REFUSED, given, told, str(caught.value))


def test_no_chat_template() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template, this one has none; use"):
        ChatFormat(build(FAMILIES["qwen3"], None), ())


def test_tools_that_are_not_shown() -> None:
    with pytest.raises(ConfigError, match="needs a chat template that shows them.*writes the same without; take"):
        ChatFormat(build_byte_tokenizer(), (ADD,))
    ChatFormat(build_byte_tokenizer(), ())


def test_calls_in_no_known_way_go_with_a_named_one() -> None:
    [own] = [given for given, _ in rows(REFUSED) if "[TOOL_CALLS]" in given]
    open_changed(own, tool_format="hermes")


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
    opened = open_changed("qwen2_5 with tools")
    with pytest.raises(ConfigError, match="must have a user message, because what reset returns is put after it"):
        opened.first([{"role": "system", "content": "S"}], "O")
    with pytest.raises(DataError, match=r"must not hold the pad token, got '<\|endoftext\|>'"):
        opened.first([{"role": "user", "content": "<|endoftext|>"}], None)
    with pytest.raises(ConfigError, match="must accept the roles system, user.*take turns, got system; take"):
        open_changed("gemma2").first([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], None)
