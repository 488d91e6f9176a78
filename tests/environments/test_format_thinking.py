"""Qwen3's template drops thinking before a message of the user; the ids lose it, and nothing is encoded again."""

from typing import Any

import pytest

from tests.environments.template_families import FAMILIES, TEMPLATES, build, chat_format, follow, ids, tokenizer
from tpu_grpo.environments.chat_format import ChatFormat
from tpu_grpo.environments.turn_tokens import Cutter

FIRST = [{"role": "user", "content": "Guess."}]
OPENS = "<|im_start|>assistant\n"
ASKED = f"<|im_start|>user\nGuess.<|im_end|>\n{OPENS}"


def q(text: str) -> list[int]:
    return ids("qwen3", text)


def said(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": answer}]


def test_thinking_is_cut_and_a_new_prompt_begins() -> None:
    """Three turns, two of them answered by the user: each answer begins a sequence of its own."""
    opened = chat_format("qwen3", tools=())
    prompt = opened.first(FIRST, None)[1]
    assert prompt == q(ASKED)
    # "47" sampled as two tokens, and three newlines behind the thinking as two
    turn = [*q("<think>\nlow? 4"), *q("7"), *q("\n</think>"), *q("\n\n"), *q("\n"), *q("4"), *q("7"), *q("<|im_end|>")]
    following = follow(opened, prompt, turn, said("low"))
    suffix = q(f"\n<|im_start|>user\nlow<|im_end|>\n{OPENS}")
    assert list(following.suffix) == suffix
    assert following.new_prompt == (*prompt, *q("4"), *q("7"), *q("<|im_end|>"))
    assert q("47") != [*q("4"), *q("7")]

    assert following.new_prompt is not None
    second = [*following.new_prompt, *suffix]
    following = follow(opened, second, q("<think>\nmore\n</think>\n\n60<|im_end|>"), said("high"), len(prompt))
    assert following.new_prompt == (*second, *q("60<|im_end|>"))
    assert list(following.suffix) == q(f"\n<|im_start|>user\nhigh<|im_end|>\n{OPENS}")


def test_the_cut_past_is_what_the_template_writes() -> None:
    opened = chat_format("qwen3", tools=())
    messages = [*FIRST]
    past = opened.first(FIRST, None)[1]
    for number, answer in (("50", "low"), ("75", "high")):
        turn = q(f"<think>\nT{number}\n</think>\n\n{number}<|im_end|>")
        following = follow(opened, past, turn, said(answer), len(q(ASKED)))
        assert following.new_prompt is not None
        past = [*following.new_prompt, *following.suffix]
        messages += [{"role": "assistant", "content": f"<think>\nT{number}\n</think>\n\n{number}"}, *said(answer)]
    assert past == tokenizer("qwen3").apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("turn", ["50<|im_end|>", "<think>\nnever closed<|im_end|>"])
def test_a_turn_without_thinking_leaves_the_past_as_it_is(turn: str) -> None:
    opened = chat_format("qwen3", tools=())
    prompt = opened.first(FIRST, None)[1]
    assert follow(opened, prompt, q(turn), said("low")).new_prompt is None


def test_with_thinking_off_the_empty_block_goes_before_the_user_speaks_and_stays_before_a_tool_does() -> None:
    empty = "<think>\n\n</think>\n\n"
    opened = chat_format("qwen3", tools=(), enable_thinking=False)
    prompt = opened.first(FIRST, None)[1]
    assert prompt == q(ASKED + empty)
    turn = q("50<|im_end|>")
    following = follow(opened, prompt, turn, said("low"))
    assert following.new_prompt == tuple(q(f"{ASKED}50<|im_end|>"))
    assert list(following.suffix) == q(f"\n<|im_start|>user\nlow<|im_end|>\n{OPENS}{empty}")

    with_tools = chat_format("qwen3", enable_thinking=False)
    prompt = with_tools.first(FIRST, None)[1]
    answers = [{"role": "tool", "name": "add", "content": "85"}]
    assert follow(with_tools, prompt, turn, answers).new_prompt is None


def variant(*changes: tuple[str, str], tools: Any = (), switches: Any = None) -> ChatFormat:
    """Open Qwen3's template with changes."""
    template = (TEMPLATES / "qwen3.jinja").read_text()
    for old, new in changes:
        assert old in template
        template = template.replace(old, new)
    return ChatFormat(build(FAMILIES["qwen3"], template), tools, "auto", switches)


OPENED = (
    "{{- '<|im_start|>assistant\\n' -}}\n    {{- '<think>",
    "{{- '<|im_start|>assistant\\n<think>\\n' -}}\n    {{- '<think>",
)


def test_a_template_that_opens_the_thinking() -> None:
    """As that of the models that always think: the opening tag is in the prompt, and is cut with the rest."""
    opened = variant(OPENED)
    prompt = opened.first(FIRST, None)[1]
    assert prompt == q(f"{ASKED}<think>\n")
    turn = q("hm\n</think>\n\n50<|im_end|>")
    following = follow(opened, prompt, turn, said("low"))
    assert following.new_prompt == tuple(q(f"{ASKED}50<|im_end|>"))
    action = opened.read(turn)
    assert (action.thinking, action.content, action.text) == ("hm", "50", "hm\n</think>\n\n50")
    assert opened.read(q("no end of it<|im_end|>")).thinking == "no end of it"


def test_newlines_stay_where_the_template_keeps_them() -> None:
    opened = variant((".split('</think>')[-1].lstrip('\\n')", ".split('</think>')[-1]"))
    prompt = opened.first(FIRST, None)[1]
    turn = q("<think>\nhm\n</think>\n\n50<|im_end|>")
    following = follow(opened, prompt, turn, said("low"))
    assert following.new_prompt == (*q(ASKED), *q("\n\n"), *q("50<|im_end|>"))


def test_thinking_in_the_prompt_itself_is_not_cut() -> None:
    cutter = Cutter(opened=(), close_id=9, newline_ids=frozenset({0}))
    #      prompt       turn             answer   turn
    ids_ = [8, 9, 1, *(8, 5, 9, 0, 0, 6), 7, 9, *(4, 9, 3)]
    marks = [False] * 3 + [True] * 6 + [False] * 2 + [True] * 3
    assert cutter.cut(ids_, marks) == [8, 9, 1, 6, 7, 9, 3]


def test_only_the_last_end_of_thinking_counts() -> None:
    cutter = Cutter(opened=(8,), close_id=9, newline_ids=frozenset({0}))
    assert cutter.cut([1, 8, 5, 9, 2, 9, 0, 3], [False] * 2 + [True] * 6) == [1, 3]
    assert cutter.cut([1, 8, 5, 3], [False] * 2 + [True] * 2) == [1, 8, 5, 3]
