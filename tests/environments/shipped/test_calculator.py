"""What the calculators compute, and refuse."""

from pathlib import Path
from typing import Any

import pytest
from simpleeval import InvalidExpression

from tests.goldens import labelled
from tpu_grpo.environments.shipped.calculator import Arithmetic, Calculator

LABELLED = Path(__file__).with_name("labelled.txt")


def test_it_adds():
    environment = Calculator()
    assert environment.reset(question="347+589=", answer="936") is None
    assert environment.add(347, 589) == 936
    assert environment.add(a=-5, b=3) == -2


@pytest.mark.parametrize("wrong", ["347", 1.5, None, True])
def test_it_adds_nothing_but_whole_numbers(wrong: Any):
    with pytest.raises(TypeError, match=f"a must be a whole number, got {wrong!r}"):
        Calculator().add(wrong, 1)
    with pytest.raises(TypeError, match=f"b must be a whole number, got {wrong!r}"):
        Calculator().add(1, wrong)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 12", "84"),
        ("7 / 2", "3.5"),
        ("7 // 2 % 2", "1"),
        ("2^10 - 2**3", "1016"),
        ("6 × 7 ÷ 2 − 1", "20.0"),
        ("-max(1, 5) + round(2.6)", "-2"),
    ],
)
def test_expressions(expression: str, value: str):
    environment = Arithmetic()
    environment.reset()
    assert environment.calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        *labelled(LABELLED, "refused_expressions"),
        ("-" * 7000 + "1", "an expression must have at most 1,000 characters, got 7,001"),
        ("2**" * 3000 + "1", "an expression must have at most 1,000 characters, got 9,001"),
        ("-" * 999 + "1", "the expression is nested too deep"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_arithmetic_or_too_much_is_refused_and_not_computed(expression: str, message: str):
    with pytest.raises((SyntaxError, TypeError, InvalidExpression, ValueError), match=message):
        Arithmetic().calculate(expression)


def test_large_numbers_are_computed_as_long_as_they_can_be_written():
    assert Arithmetic().calculate("10**2900") == "1" + "0" * 2900
    assert Arithmetic().calculate("(-1)**10000001 + 2**-1") == "-0.5"
    assert Arithmetic().calculate("round(1234.567, 1) + round(1234, -2)") == "2434.6"
    assert Calculator().add(10**2900, 1) == 10**2900 + 1
    with pytest.raises(ValueError, match="whole numbers must have at most 3,000 digits"):
        Calculator().add(10**4299, 9 * 10**4299)  # of 4,300 digits each, and their sum could not be written
