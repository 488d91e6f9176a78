"""Final numbers are found in hand-labelled cases and in the real GSM8K test set, and so is the form asked for."""

import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.rewards.shipped.gsm8k import final_number, gsm8k
from tpu_grpo.rewards.shipped.patterns import matches_format

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        # the number after ####
        ("2*9=18\n#### 18", "#### 18", 1.0),
        ("#### 18", "She makes 9*2=<<9*2=18>>18.\n#### 18", 1.0),
        ("####18", "18", 1.0),
        ("#### 18.", "18", 1.0),
        ("#### 18.0", "18", 1.0),
        ("#### 18.5", "18", 0.0),
        ("#### 180", "18", 0.0),
        ("#### 1", "18", 0.0),
        ("#### $18.00 per day", "18", 1.0),
        ("#### 18 dollars", "18", 1.0),
        ("#### 50%", "50", 1.0),
        ("#### 1,234,567", "#### 1234567", 1.0),
        ("#### 1234567", "#### 1,234,567", 1.0),
        ("#### 1{,}234", "1234", 1.0),
        ("#### 1,2345", "12345", 0.0),
        ("#### -5", "-5", 1.0),
        ("#### −5", "-5", 1.0),
        ("#### -$5", "-5", 1.0),
        ("#### $-5", "-5", 1.0),
        ("#### 5", "-5", 0.0),
        ("#### .5", "0.5", 1.0),
        ("#### **18**", "18", 1.0),
        ("#### 018", "18", 1.0),
        ("#### 18\n#### 19", "19", 1.0),  # the last marker is the answer
        ("#### 18\n#### 19", "18", 0.0),
        ("#### 18\nI checked this 3 times.", "18", 1.0),  # what follows the marker's number does not count
        ("#### 18\nI checked this 3 times.", "3", 0.0),
        # no number after ####: the last one of the text
        ("The answer is 18.", "18", 1.0),
        ("The answer is $1,234.50.", "1234.5", 1.0),
        ("I earn US$18", "18", 1.0),
        (r"\boxed{18}", "18", 1.0),
        (r"It costs \$18\%", "18", 1.0),
        ("16-3-4=9", "9", 1.0),
        ("That leaves 10-4", "4", 1.0),  # a difference, not -4
        ("That leaves 10-4", "-4", 0.0),
        ("The change is -4", "-4", 1.0),
        ("That is 50 m2", "50", 1.0),  # a unit's exponent is no number
        ("That is 50 m^2", "50", 1.0),
        ("The answer is...18", "18", 1.0),
        ("#### 1/2", "1", 0.0),  # a fraction is none of its parts
        ("#### 1/2", "2", 0.0),
        ("#### 12/25", "1", 0.0),
        ("#### 3.5/2", "3", 0.0),
        ("#### 18/day", "18", 1.0),
        ("18 then ####", "18", 1.0),
        ("#### eighteen", "18", 0.0),
        ("", "18", 0.0),
        ("no number here", "0", 0.0),
        # the answer column
        ("#### 18", 18, 1.0),
        ("#### 18", 18.0, 1.0),
        ("#### 10000000000000000000000", 1e22, 1.0),
        ("#### 18", "$18", 1.0),
        ("#### 18", None, None),
        ("#### 18", "", None),
        ("#### 18", "unknown", None),
        ("#### 1", True, None),
        ("#### 18", float("nan"), None),
    ],
)
def test_gsm8k(completion: str, answer: Any, expected: float | None):
    assert gsm8k([completion], [answer]) == [expected]


@pytest.mark.parametrize(
    ("completion", "expected"), [("#### 18", 1.0), ("The answer is 18", 0.0), ("####\n18", 0.0), ("#### **18**", 1.0)]
)
def test_gsm8k_strict_wants_the_marker(completion: str, expected: float):
    assert gsm8k([completion], ["18"], flexible=False) == [expected]


def test_numbers_compare_exactly():
    digits = "0.1000000000000000055511151231257827"  # what the float 0.1 really is
    assert final_number(digits, flexible=True) == Decimal(digits)
    assert gsm8k([digits, "0.10"], ["0.1", "0.1"]) == [0.0, 1.0]


@pytest.mark.parametrize("text", ["9" * 100_000, "#" * 100_000, "1," * 50_000, "####" + " " * 100_000, "-" * 100_000])
def test_hostile_completions_take_no_time(text: str):
    started = time.perf_counter()
    gsm8k([text], ["18"])
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


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("2+3=5\n#### 5", 1.0),
        ("#### -1,234.5", 1.0),
        ("#### $5.\n", 1.0),
        ("#### 5\nso there", 0.0),
        ("so #### 5", 0.0),
        ("#### five", 0.0),
        ("5", 0.0),
    ],
)
def test_format_wants_a_last_line_with_the_number(completion: str, expected: float):
    assert matches_format([completion]) == [expected]


def test_format_with_a_pattern_over_several_lines():
    pattern = r"<think>.+</think>\s*<answer>.+</answer>"
    texts = ["x <think>a\nb</think>\n<answer>5</answer> y", "<think>a</think>", "<answer>5</answer>"]
    assert matches_format(texts, pattern=pattern) == [1.0, 0.0, 0.0]
