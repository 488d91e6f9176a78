"""What the calculators compute, and refuse."""

from typing import Any

import pytest
from simpleeval import InvalidExpression

from tpu_grpo.environments.shipped.calculator import Arithmetic, Calculator


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
        ("__import__('os')", "Function '__import__' not defined"),
        ("x + 1", "'x' is not defined"),
        ("3 +", "invalid syntax"),
        ("'a' * 3", "the expression must be of numbers, got 'aaa'"),
        ("9**9**9", "I don't want to evaluate"),
        ("2 < 3", r"the operators are \+ - \* / // % and \*\*, got another in '2 < 3'"),
    ],
)
def test_what_is_no_arithmetic_is_refused(expression: str, message: str):
    with pytest.raises((SyntaxError, TypeError, InvalidExpression, ValueError), match=message):
        Arithmetic().calculate(expression)
