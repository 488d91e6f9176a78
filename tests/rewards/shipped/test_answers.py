"""Answers as text are labelled by hand."""

from typing import Any

import pytest

from tpu_grpo.rewards.shipped.answers import exact_answer, integer_answer, multiple_choice, normalised_match
from tpu_grpo.rewards.shipped.texts import boxed, fenced, inside


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("85", "85", 1.0),
        (" 85\n", "85", 1.0),
        ("New \n  York", "New York", 1.0),
        ("NewYork", "New York", 0.0),
        ("085", "85", 0.0),
        ("85.", "85", 0.0),
        ("", "85", 0.0),
        ("85", 85, 1.0),
        ("85", None, None),
        ("", " ", None),
    ],
)
def test_exact_answer(completion: str, answer: Any, expected: float | None):
    assert exact_answer([completion], [answer]) == [expected]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("an  apple", "Apple", 1.0),
        ("Straße", "strasse", 1.0),
        ("ﬁne", "fine", 1.0),
        ("theatre", "atre", 0.0),
        ("Paris, France", "Paris", 0.0),
        ("Paris", ["London", "paris"], 1.0),
        ("Rome", ["London", "paris"], 0.0),
        ("Rome", [], None),
        ("Rome", None, None),
    ],
)
def test_normalised_match(completion: str, answer: Any, expected: float | None):
    assert normalised_match([completion], [answer]) == [expected]


def test_normalised_match_in_a_tag():
    texts = ["I think <answer>Paris.</answer>", "Paris", "<answer>Rome</answer> <answer>paris</answer>"]
    assert normalised_match(texts, ["Paris"] * 3, tag="answer") == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("B", "B", 1.0),
        ("b", "B", 1.0),
        ("B.", "(B)", 1.0),
        ("(B) Paris", "B", 1.0),
        ("The answer is B", "B", 1.0),
        ("The answer is (B).", "B", 1.0),
        ("The correct answer is: **C**", "C", 1.0),
        ("Answer: D", "D", 1.0),
        ("answer is a banana, so option C", "C", 1.0),
        (r"Thus \boxed{B}", "B", 1.0),
        (r"Thus \boxed{\text{B}}", "B", 1.0),
        ("<answer>C</answer>", "C", 1.0),
        ("The answer is A. Wait, the answer is B.", "B", 1.0),
        ("The answer is A. Wait, the answer is B.", "A", 0.0),
        ("Between (A) and (C), the latter", "C", 1.0),
        ("Some long reasoning\nB", "B", 1.0),
        ("The answer is Z", "B", 0.0),
        ("I do not know", "B", 0.0),
        ("", "B", 0.0),
        ("B", 1, 1.0),
        ("A", 1, 0.0),
        ("B", "B) Paris", 1.0),
        ("B", None, None),
    ],
)
def test_multiple_choice(completion: str, answer: Any, expected: float | None):
    assert multiple_choice([completion], [answer]) == [expected]


def test_multiple_choice_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="choices must be at least two letters, got 'A'"):
        multiple_choice([], [], choices="A")
    with pytest.raises(ValueError, match="answer must be one of the choices ABCDE or its number, got 'Paris'"):
        multiple_choice(["B"], ["Paris"])


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>12</answer>", 1.0),
        ("<answer> -1,200 </answer>", 1.0),
        ("<answer>12.5</answer>", 0.0),
        ("<answer>12 apples</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("12", 0.0),
    ],
)
def test_integer_answer(completion: str, expected: float):
    assert integer_answer([completion]) == [expected]


def test_integer_answer_of_the_whole_text():
    assert integer_answer(["12", "x12"], tag=None) == [1.0, 0.0]


def test_parts_of_texts():
    assert inside("<a>1</a> <a>2</a>", "a") == "2"
    assert inside("<a>1", "a") is None
    assert inside("</a><a>", "a") is None
    assert boxed(r"\boxed{a{b}c} \boxed {d} \boxed{e") == ["a{b}c", "d"]
    assert fenced("```python\nx\n```\n```\ny\n```\n```c\nz\n```", ("python",)) == "y\n"
    assert fenced("x", ("python",)) is None
