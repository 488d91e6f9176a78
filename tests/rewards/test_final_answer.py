"""Which answer of a completion a vote counts, and which answers are one."""

import re

import pytest

from tpu_grpo.rewards.final_answer import final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1,000}", "1000"),
        ("<answer> Paris. </answer> 7", "Paris"),
        ("<answer>$12.50</answer>", "12.5"),
        ("2 + 2 = 4\n#### 4", "4"),
        ("#### 5 and then 6", "5"),
        ("first 3, then 4.0 apples.", "4"),
        ("it costs $1,234.50", "1234.5"),
        ("about -7", "-7"),
        ("-0", "0"),
        ("No  number\nhere.", "No number here"),
        ("", None),
        (" \n", None),
        (r"\boxed{}", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize("text", ["18", "18.0", "$18.00", "#### 18.", r"\boxed{18}", "<answer>18</answer>"])
def test_ways_to_write_one_number_are_one_answer(text: str) -> None:
    assert final_answer(text) == "18"


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r"Answer: (\w+)", "Answer: a. Answer: b.", "b"),
        (r"[A-D]$", "B or C", "C"),
        (r"Answer: (\w+)", "no such thing 7", None),
        (r"(x)|y", "x y", None),  # the last match has no group
    ],
)
def test_a_pattern_says_where_the_answer_is(pattern: str, text: str, answer: str | None) -> None:
    assert final_answer(text, re.compile(pattern)) == answer
