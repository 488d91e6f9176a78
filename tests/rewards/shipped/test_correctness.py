"""Answers as text, final numbers and final answers are labelled by hand; the real GSM8K test set is read, too."""

import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import labelled
from tpu_grpo.config import RewardSpec
from tpu_grpo.rewards import load_reward
from tpu_grpo.rewards.shipped import SHIPPED
from tpu_grpo.rewards.shipped.correctness import (
    boxed,
    exact_answer,
    fenced,
    final_answer,
    final_number,
    gsm8k,
    inside,
    integer_answer,
    multiple_choice,
    normalised_match,
    voted_answer,
)
from tpu_grpo.rewards.shipped.form import matches_format

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"
LABELLED = Path(__file__).with_name("labelled.txt")
"""What a completion, and an answer, is worth, by reward."""


OF_AN_ANSWER = {f.__name__: f for f in (exact_answer, normalised_match, multiple_choice, gsm8k)}


@pytest.mark.parametrize(
    ("name", "completion", "answer", "expected"),
    [
        *((name, *row) for name in OF_AN_ANSWER for row in labelled(LABELLED, name)),
        ("gsm8k", "#### 1" + "0" * 400, "#### 1e400", 1.0),
        pytest.param("gsm8k", "#### 18", 10**5000, 0.0, id="5000 digits"),
        ("gsm8k", "#### 18", float("nan"), None),
    ],
)
def test_completions_and_answers(name: str, completion: str, answer: Any, expected: float | None):
    assert OF_AN_ANSWER[name]([completion], [answer]) == [expected]


def test_normalised_match_in_a_tag():
    texts = ["I think <answer>Paris.</answer>", "Paris", "<answer>Rome</answer> <answer>paris</answer>"]
    assert normalised_match(texts, ["Paris"] * 3, tag="answer") == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "text", ["answer" + " " * 100_000, "\n" * 100_000 + "!", "```python\n" * 10_000, "\\boxed{" * 15_000]
)
def test_long_repeats_take_no_time(text: str):
    started = time.perf_counter()
    assert multiple_choice([text], ["B"]) == [0.0]
    assert fenced(text, ("python",)) is None
    assert time.perf_counter() - started < 5.0


def test_multiple_choice_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="choices must be at least two letters, got 'A'"):
        multiple_choice([], [], choices="A")
    for answer in ("Paris", "5", 5, "-1", True):
        with pytest.raises(ValueError, match=f"answer must be one of the choices ABCDE or its number, got {answer!r}"):
            multiple_choice(["B"], [answer])


@pytest.mark.parametrize(("completion", "expected"), labelled(LABELLED, "integer_answer"))
def test_integer_answer(completion: str, expected: float):
    assert integer_answer([completion]) == [expected]


def test_integer_answer_of_the_whole_text():
    assert integer_answer(["12", "x12"], tag=None) == [1.0, 0.0]


def test_parts_of_texts():
    assert inside("<a>1</a> <a>2</a>", "a") == "2"
    assert inside("<a>1", "a") is None
    assert inside("</a><a>", "a") is None
    assert boxed(r"\boxed{a{b}c} \boxed {d} \boxed{e") == ["a{b}c", "d"]
    assert boxed(r"} \boxed{a \boxed{b}} {\boxed{c} \boxed{{d}") == [r"a \boxed{b}", "b", "c"]
    assert fenced("```python\nx\n```\n```\ny\n```\n```c\nz\n```", ("python",)) == "y\n"
    assert fenced("x", ("python",)) is None
    assert fenced(" ```Python\r\nx\n```c\ny\n\n```\n```python\nz", ("python",)) == "x\n```c\ny\n\n"


# --- the final number ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "expected"), [("#### 18", 1.0), ("The answer is 18", 0.0), ("####\n18", 0.0), ("#### **18**", 1.0)]
)
def test_gsm8k_strict_wants_the_marker(completion: str, expected: float):
    assert gsm8k([completion], ["18"], flexible=False) == [expected]


def test_numbers_compare_exactly():
    digits = "0.1000000000000000055511151231257827"  # what the float 0.1 really is
    assert final_number(digits, flexible=True) == Decimal(digits)
    assert gsm8k([digits, "0.10"], ["0.1", "0.1"]) == [0.0, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        *["9" * 100_000, "#" * 100_000, "1," * 50_000, "####" + " " * 100_000, "-" * 100_000],
        *[
            "1 " * 50_000,
            "1e999 " * 15_000,
            "1½" * 50_000,
            "1/2 " * 25_000,
            r"\boxed{" * 15_000,
            r"\boxed" + " " * 100_000,
        ],
    ],
)
def test_hostile_completions_take_no_time(text: str):
    started = time.perf_counter()
    gsm8k([text], ["18"])
    voted_answer(text)
    matches_format([text])
    assert time.perf_counter() - started < 5.0


def gsm8k_references() -> list[str]:
    if not GSM8K.exists():
        pytest.skip("the GSM8K test set is not here: ../shared/data/gsm8k/test.jsonl")
    return [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]


def test_gsm8k_on_the_reference_solutions():
    answers = gsm8k_references()
    assert len(answers) == 1319
    for flexible in (True, False):
        assert gsm8k(answers, answers, flexible=flexible) == [1.0] * 1319
    without_marker = [a.replace("####", "So the answer is") for a in answers]
    assert gsm8k(without_marker, answers) == [1.0] * 1319
    assert matches_format(answers) == [1.0] * 1319


def test_gsm8k_on_solutions_of_other_problems():
    """Each solution meets the next answer of another value, read here without the code under test."""
    answers = gsm8k_references()
    value = [float(a.rpartition("#### ")[2].replace(",", "")) for a in answers]
    n = len(answers)
    others = [next((i + k) % n for k in range(1, n) if value[(i + k) % n] != value[i]) for i in range(n)]
    assert gsm8k(answers, [answers[i] for i in others]) == [0.0] * n


# --- the final answer of a conversation ------------------------------------------------------------------------------

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
TOLD = {"role": "tool", "name": "add", "content": "936"}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("messages", "score"),
    [
        ([CALL, TOLD, says("936")], 1.0),
        ([CALL, TOLD, says(" 936\n")], 1.0),
        ([CALL, TOLD, says("~900")], 0.0),
        ([says("936")], 1.0),
        ([says("936"), TOLD, says("935")], 0.0),  # the last turn alone counts
        ([CALL, TOLD], 0.0),  # it ends with the tool
        ([{**CALL, "content": "936"}], 0.0),  # a call is no answer
        ([], 0.0),
    ],
)
def test_the_last_turn_is_compared(messages: list[dict[str, str]], score: float):
    assert final_answer([messages], ["936"]) == [score]


def test_a_verifier_decides():
    rows = [[says("so it is #### 1,000")], [CALL], [says("1000")]]
    assert final_answer(rows, ["1000", "1000", None], verifier="gsm8k") == [1.0, 0.0, None]
    assert final_answer([[says("The Cat!")], [CALL]], ["cat", None], verifier="normalised_match") == [1.0, None]
    with pytest.raises(ValueError, match="verifier must be one of gsm8k, .*math, got 'judge'"):
        final_answer([], [], verifier="judge")


def test_it_gets_messages_without_being_told_to():
    assert load_reward(RewardSpec(name="final_answer"), ("answer",)).messages
    assert not load_reward(RewardSpec(name="exact_answer"), ("answer",)).messages


@pytest.mark.parametrize(("text", "answer"), labelled(LABELLED, "voted_answer"))
def test_the_last_answer_counts_in_a_vote(text: str, answer: str | None) -> None:
    assert voted_answer(text) == answer


def test_thinking_has_no_vote() -> None:
    assert voted_answer("<think>3</think> It is 4.") == "4"
    assert voted_answer("<think>3, or 4") is None
    assert voted_answer("3, or 4", prompt="<|assistant|><think>\n") is None
    assert voted_answer("3</think>4", prompt="<|assistant|><think>\n") == "4"


@pytest.mark.parametrize("text", ["18", "18.0", "$18.00", "#### 18.", r"\boxed{18}", "<answer>18</answer>"])
def test_ways_to_write_one_number_are_one_answer(text: str) -> None:
    assert voted_answer(text) == "18"


@pytest.mark.parametrize("name", ["exact_answer", "normalised_match", "multiple_choice", "gsm8k", "math", "regex"])
@pytest.mark.parametrize(
    "giant", ["x" * 2**24, "$1$ " * 2**22, "\\boxed{" * 2**21], ids=["letters", "dollars", "boxes"]
)
def test_a_giant_reference_is_refused_before_it_is_read(name: str, giant: str) -> None:
    """Of such a row, gsm8k took up to 17 seconds, and math its whole limit, on a thread that other rewards wait for."""
    reward, options = SHIPPED[name].load(), {"pattern": "(.*)"} if name == "regex" else {}
    given: Any = ("18", giant) if name == "math" else (["18"], [giant])
    began = time.monotonic()
    with pytest.raises(ValueError, match="an answer must have at most 131072 characters, got 16777216|14680064"):
        reward(*given, **options)
    assert time.monotonic() - began < 0.5
