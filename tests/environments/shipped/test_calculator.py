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
        ("exec(1)", "Function 'exec' not defined"),
        ("__import__('os')", "the expression must be of numbers, got 'os'"),
        ("x + 1", "'x' is not defined"),
        ("3 +", "invalid syntax"),
        ("'a' * 3", "the expression must be of numbers, got 'a'"),
        ("True + 1", "the expression must be of numbers, got True"),
        ("2 < 3", "an expression has numbers, brackets, .* got something else in '2 < 3'"),
        ("3 | 4", "got something else in '3 | 4'"),
        ("(5).bit_length()", "got something else"),
        ("max(*abs)", "got something else"),
        ("1; 2", "invalid syntax"),
        ("abs", "the expression must be of numbers, got <built-in"),
        # each of these would take the process's memory, or seconds, and so end the conversation, or the run
        ("-" * 7000 + "1", "an expression must have at most 1,000 characters, got 7,001"),
        ("2**" * 3000 + "1", "an expression must have at most 1,000 characters, got 9,001"),
        ("-" * 999 + "1", "the expression is nested too deep"),
        ("9**9**9", "whole numbers must have at most 3,000 digits"),
        ("4000000**400000", "whole numbers must have at most 3,000 digits"),
        ("2**-1 + 2**10**400", "whole numbers must have at most 3,000 digits"),
        ("9**3000 * 9**3000 * 9**3000", "whole numbers must have at most 3,000 digits"),
        ("round(5, -1000000000)", "a number is rounded to at most 400 places, got -1000000000"),
        ("'%1000000000d' % 1", "the expression must be of numbers"),
        ("f'{1:>1000000000}'", "got something else"),
        ("(5).to_bytes(4000000000)", "got something else"),
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
