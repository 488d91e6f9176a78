"""Prompt texts and ids are written out by hand, and every way that a template or a record can be wrong is met."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from tests.goldens import cases, compare
from tpu_grpo.config import DataSection
from tpu_grpo.data.rendering import PromptRenderer, render_records
from tpu_grpo.records.errors import ConfigError, DataError

BROKEN = Path(__file__).with_name("broken_records.txt")
"""Records, with settings of the section data."""
RECORD = {"question": "2+3=", "answer": 5}


def render(tokenizer: PreTrainedTokenizerFast, record: dict[str, Any] = RECORD, **settings: Any):
    return PromptRenderer(DataSection(**settings), tokenizer).render(record, "record 0")


def test_chat_template_with_a_system_message(tokenizer: PreTrainedTokenizerFast):
    prompt = render(tokenizer, system_prompt="Add.", prompt_template="Q {question} ({answer:02d})")
    assert prompt.text == "<s>system:Add.</s><s>user:Q 2+3= (05)</s><s>assistant:"
    assert prompt.columns == RECORD
    assert [i for i in prompt.token_ids if i >= 256] == [257, 258, 257, 258, 257]  # no special token is added twice
    assert len(prompt.token_ids) == 5 + len("system:Add.user:Q 2+3= (05)assistant:")


def test_plain_prompts_are_the_users_message(tokenizer: PreTrainedTokenizerFast):
    prompt = render(tokenizer, chat_template=False, prompt_template="{question}{{}}")
    assert prompt.text == "2+3={}"
    assert tokenizer.decode(list(prompt.token_ids)) == "2+3={}"
    assert len(prompt.token_ids) == 6


def test_plain_prompts_get_the_tokenizers_own_special_tokens(tokenizer: PreTrainedTokenizerFast):
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    assert render(tokenizer, chat_template=False).token_ids[0] == 257
    assert render(tokenizer).token_ids[:2] != (257, 257)


def test_fields_may_reach_into_a_column(tokenizer: PreTrainedTokenizerFast):
    record = {"q": {"text": "hi"}, "l": ["a", "b"]}
    assert render(tokenizer, record, chat_template=False, prompt_template="{q[text]} {l[1]}").text == "hi b"


def test_settings_the_tokenizer_cannot_follow(tokenizer: PreTrainedTokenizerFast):
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    with pytest.raises(ConfigError, match=r"accept the roles \['system', 'user'\] of record 0, it says: no system"):
        render(tokenizer, system_prompt="Add.")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"this one has none; set data\.chat_template=false"):
        render(tokenizer)


@pytest.mark.parametrize(("given", "told"), cases(BROKEN))
def test_a_record_that_gives_no_prompt(tokenizer: PreTrainedTokenizerFast, given: str, told: str):
    record, _, settings = given.partition(" | ")
    with pytest.raises((ConfigError, DataError)) as caught:
        render(tokenizer, json.loads(record), **yaml.safe_load(f"{{{settings}}}"))
    compare(BROKEN, given, told, f"{caught.typename}: {caught.value}")


# Plain prompts of the byte tokenizer have as many tokens as bytes.
LENGTHS = [{"question": "x" * n} for n in (3, 5, 4, 9, 1)]


def rendered(tokenizer: PreTrainedTokenizerFast, limit: int | None = None, **settings: Any):
    data = DataSection(chat_template=False, **settings)
    return render_records(PromptRenderer(data, tokenizer), LENGTHS, "x.jsonl", limit=limit)


def test_too_long_prompts_are_an_error_that_names_the_first_and_the_longest(tokenizer: PreTrainedTokenizerFast):
    message = (
        r"at most data\.max_prompt_tokens=4 tokens, got 5 in record 1 of x\.jsonl \(from 0; 2 of 5 are too long, the "
        r"longest 9\); raise data\.max_prompt_tokens to 9 or set data\.too_long=drop"
    )
    with pytest.raises(DataError, match=message):
        rendered(tokenizer, max_prompt_tokens=4)


def test_dropping_all_is_an_error(tokenizer: PreTrainedTokenizerFast):
    data = DataSection(chat_template=False, max_prompt_tokens=2, too_long="drop")
    with pytest.raises(DataError, match=r"4 of 4 are too long, the longest 9\); raise data\.max_prompt_tokens to 9$"):
        render_records(PromptRenderer(data, tokenizer), LENGTHS[:4], "x.jsonl")


def test_the_limit_counts_prompts_that_fit(tokenizer: PreTrainedTokenizerFast):
    result = rendered(tokenizer, limit=2, max_prompt_tokens=4, too_long="drop")
    assert [p.text for p in result.prompts] == ["xxx", "xxxx"]
    assert [p.text for p in rendered(tokenizer, limit=9).prompts] == [r["question"] for r in LENGTHS]


# --- conversations ---------------------------------------------------------------------------------------------------


def test_a_prompt_knows_its_conversation_and_what_the_user_says(tokenizer: PreTrainedTokenizerFast):
    """Neither the system message nor the template's tokens are what the user says."""
    system, asked = {"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="}
    prompt = render(tokenizer, system_prompt="Add.")
    assert (list(prompt.conversation), prompt.asked) == ([system, asked], "2+3=")
    talk = [asked, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"}]
    prompt = render(tokenizer, {"question": "x", "chat": talk}, messages="chat", system_prompt="Add.")
    assert (list(prompt.conversation), prompt.asked) == ([system, *talk], "2+3=\n\nSure?")
    plain = render(tokenizer, {"prompt": talk}, chat_template=False)
    assert (plain.text, plain.asked) == ("2+3=5\n\nSure?", "2+3=\n\nSure?")


def test_messages_of_a_column_are_the_conversation(tokenizer: PreTrainedTokenizerFast):
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "2+3?")]
    record = {"chat": [{"role": role, "content": text, "extra": 1} for role, text in turns]}
    prompt = render(tokenizer, record, messages="chat", system_prompt="Add.")
    assert prompt.text == "<s>system:Add.</s><s>user:Hi</s><s>assistant:Hello</s><s>user:2+3?</s><s>assistant:"


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_the_thinking_switch(tokenizer: PreTrainedTokenizerFast, name: str):
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% if not " + name + " | default(true) %}<think></think>{% endif %}"
    )
    texts = [render(tokenizer, thinking=thinking).text for thinking in (None, True, False)]
    assert texts == ["2+3=", "2+3=", "2+3=<think></think>"]


def test_a_template_that_asks_for_the_date_is_told_the_configs(tokenizer: PreTrainedTokenizerFast):
    """As Llama 3.2's, which has this day for templates that cannot ask; hosts, and days, must not differ."""
    tokenizer.chat_template = (
        "{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% endif %}"
        "{% macro at() %}{{ strftime_now('%H:%M') }}{% endmacro %}"
        "Today: {{ today }} {{ at() }} {{ messages[0]['content'] }}"
    )
    assert render(tokenizer).text == "Today: 26 Jul 2024 00:00 2+3="
    assert render(tokenizer, date="2031-02-03").text == "Today: 03 Feb 2031 00:00 2+3="


def test_a_template_without_a_thinking_switch(tokenizer: PreTrainedTokenizerFast):
    tokenizer.chat_template = "{{ messages[0]['content'] }} thinking {{ '<thinking>' }}"
    with pytest.raises(ConfigError, match="data.thinking=false needs a chat template with a switch for it"):
        render(tokenizer, thinking=False)


def test_prompts_offer_the_tools_of_their_environments(tokenizer: PreTrainedTokenizerFast):
    """Those of several environments are written with their own; an empty prompt waits for what reset gives."""
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | map(attribute='name') | join(',') }}: {% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    offered = {"a": [{"name": "add"}, {"name": "sub"}], "b": [{"name": "move"}], "c": []}
    records = [{"question": q, "environment": e} for q, e in (("1", "a"), ("2", "b"), ("3", "a"), ("", "c"), ("", "b"))]

    def tools_of(record: Any, where: str) -> Any:
        assert where.startswith("record ")
        return offered[record["environment"]]

    data = DataSection(max_prompt_tokens=20)
    rendered = render_records(PromptRenderer(data, tokenizer, tools_of), records, "x.jsonl")
    texts = [prompt.text for prompt in rendered.prompts]
    assert texts == ["add,sub: 1>", "move: 2>", "add,sub: 3>", ">", "move: >"]
    assert [tokenizer.decode(prompt.token_ids) for prompt in rendered.prompts] == texts
