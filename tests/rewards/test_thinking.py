"""What rewards are given of completions that think: an answer is what follows the thinking."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.rewards.conftest import MakeFile, answered, make_rollout
from tpu_grpo.config import RewardSpec
from tpu_grpo.rewards.shipped import SHIPPED
from tpu_grpo.rewards.shipped.correctness import VERIFIERS

OPENING = "<|user|>1+1<|assistant|><think>\n"
OPTIONS: Mapping[str, dict[str, Any]] = {
    "final_answer": {"verifier": "gsm8k"},
    "normalised_match": {"tag": "answer"},
    "regex": {"pattern": r"#### (\d)"},
    "cosine_length": {"max_tokens": 2},
    "json_schema": {"schema": {"type": "integer"}, "tag": "answer"},
}
ROW = {
    "target": 2,
    "nums": [2],
    "metadata": {"source_dataset": "chain_sum"},
    "tests": ["assert x == 2"],
    "instruction_id_list": ["startend:end_checker"],
    "kwargs": [{"end_phrase": "x = 2\n```"}],
}
ANSWER = "It is \\boxed{2}, #### 2 <answer>2</answer>\n```python\nx = 2\n```"
OF_ANSWERS = sorted(n for n, s in SHIPPED.items() if s.thinking == "dropped if opened" and n != "judge")


def score(name: str, text: str, prompt: str = "1+1", **options: Any) -> float | None:
    answer = {"multiple_choice": "B", "exact_answer": "2"}.get(name, "2")
    spec = RewardSpec(name=name, options={**OPTIONS.get(name, {}), **options})
    found = answered(make_rollout([prompt], [text], [{**ROW, "answer": answer}]), spec)
    assert found.problems == []
    return found.values[0]


def test_every_verifier_judges_answers() -> None:
    assert {*VERIFIERS, "regex", "integer_answer", "reasoning_gym"} <= {*OF_ANSWERS}


@pytest.mark.full
@pytest.mark.parametrize("name", OF_ANSWERS)
def test_an_answer_follows_the_thinking(name: str) -> None:
    answer = {"exact_answer": "2", "multiple_choice": "So it is (B)"}.get(name, ANSWER)
    right, wrong = score(name, answer), score(name, "3")
    assert wrong == (-0.75 if name == "cosine_length" else 0.0)
    assert right == (0.75 if name == "cosine_length" else 1.0)
    other = "or 3, (C) <answer>no</answer>\n```python\nx = 3\n```\n"
    for begin, prompt in (("<think>", "1+1"), (" \n<think>\n", OPENING), ("", OPENING)):
        assert score(name, f"{begin}{answer} {other}", prompt) == wrong
        assert score(name, f"{begin}{other}</think>{answer}", prompt) == right
        assert score(name, f"{begin}{answer}</think>{other}", prompt) == wrong
        assert score(name, f"{begin}{other}</think>{answer}<think>{other}", prompt) == right
        assert score(name, f"{begin}hm</think>\n<think>{other}\n{answer}", prompt) == wrong


def test_the_option_decides() -> None:
    thought, both = "#### 2</think>", "#### 2</think> #### 3"
    assert [score("gsm8k", both, after_thinking=value) for value in (None, True, False)] == [0.0, 0.0, 0.0]
    assert [score("gsm8k", thought, after_thinking=value) for value in (None, True, False)] == [1.0, 0.0, 1.0]
    assert [score("gsm8k", thought, OPENING, after_thinking=value) for value in (None, True, False)] == [0.0, 0.0, 1.0]
    assert [score("gsm8k", "#### 2", after_thinking=value) for value in (None, True, False)] == [1.0, 1.0, 1.0]
    assert score("gsm8k", "#### 2", "<think>\n</think>\n\n") == 1.0  # a template that turns thinking off
    assert score("gsm8k", "#### 2", "Is <think> a tag?") == 1.0


def test_a_pattern_that_names_the_tag_is_for_the_whole_text() -> None:
    pattern = r"\A<think>.*</think>\s*(\d)\Z"
    assert score("regex", "hm</think>\n2", OPENING, pattern=pattern) == 1.0
    assert score("format", "hm</think>\n2", OPENING, pattern=pattern) == 1.0
    assert score("format", "hm</think>\n2", pattern=pattern) == 0.0
    assert score("format", "hm</think>\n2", OPENING, pattern=r"hm</think>\s*\d", full=True) == 0.0
    assert score("format", "hm 2", OPENING, pattern=r"hm \d", full=True) == 1.0


@pytest.mark.parametrize("mode", ["soft", "strict", "per_tag"])
def test_the_tag_that_the_prompt_opens_counts(mode: str) -> None:
    text = "hm\n</think>\n<answer>\n2\n</answer>"
    assert score("think_answer", text, OPENING, mode=mode) == 1.0
    assert score("think_answer", text, mode=mode) == (0.75 if mode == "per_tag" else 0.0)
    assert score("think_answer", f"<think>\n{text}", OPENING, mode=mode) == (0.75 if mode == "per_tag" else 0.0)
    own = text.replace("think", "plan")
    assert score("think_answer", own, "Do it.\n<plan>\n", mode=mode, think="plan") == 1.0
    assert score("think_answer", f"<think>\n{text}", "Do it.\n<plan>\n", mode=mode) == 1.0


def test_tags_are_counted_with_that_of_the_prompt() -> None:
    assert score("xml_count", "hm</think><answer>2</answer>", OPENING) == 1.0
    assert score("xml_count", "hm</think><answer>2</answer>") == 0.75
    assert score("xml_count", "hm</plan>!", "<plan>", tags=["plan"]) == 1.0 - 0.001


def test_own_rewards_get_the_whole_text(reward_file: MakeFile) -> None:
    path = reward_file("def f(completions):\n    return [float('hm' in c) for c in completions]\n")
    assert score(f"{path}:f", "hm</think> 2", OPENING) == 1.0


def test_a_text_as_a_message_has_no_thinking_either() -> None:
    spec = RewardSpec(name="final_answer", options={"verifier": "exact_answer"})
    rollout = make_rollout([OPENING], ["hm</think> 2", "hm 2"], [{"answer": "2"}])
    assert answered(rollout, spec).values == [1.0, 0.0]
