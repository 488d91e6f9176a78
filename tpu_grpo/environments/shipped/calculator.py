"""Calculators: one that adds, which the demo's model learns to call, and one that computes expressions.

A call with numbers or an expression too long, too large or nested too deep raises an error. The policy gets the error's
message.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from simpleeval import SimpleEval

MOST_DIGITS = 3000
"""About the most digits that a whole number may have; Python prints at most 4,300 digits."""
MOST_CHARACTERS = 1000
MOST_PLACES = 400
"""The most decimal places, after or before the point, to which a number can be rounded."""
_MOST_BITS = MOST_DIGITS * 332 // 100
_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load)


class Calculator:
    """A calculator that can add."""

    def reset(self, **columns: Any) -> None:
        """Begin an episode, without an observation."""

    def add(self, a: int, b: int) -> int:
        """Add two whole numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            Their sum.
        """
        for name, value in (("a", a), ("b", b)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            _bounded(value.bit_length())
        return a + b


class Arithmetic:
    """A calculator for whole expressions."""

    def reset(self, **columns: Any) -> None:
        """Begin an episode, without an observation."""

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression, such as (3 + 4) * 12.5 / 7.

        Args:
            expression: Numbers, brackets, + - * / // % **, and abs, min, max, round.

        Returns:
            The value.
        """
        if len(expression) > MOST_CHARACTERS:
            raise ValueError(f"an expression must have at most {MOST_CHARACTERS:,} characters, got {len(expression):,}")
        written = expression.replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**").strip()
        try:
            tree = ast.parse(written, mode="eval")
            _check(tree, expression)
            value = SimpleEval(operators=_OPERATORS, functions=_FUNCTIONS, names={}).eval(written, tree.body)
        except (RecursionError, MemoryError):  # Python's parser raises them, too
            raise ValueError("the expression is nested too deep") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"the expression must be of numbers, got {value!r}")
        return str(value)


def _check(tree: ast.Expression, expression: str) -> None:
    """Raise an error for anything that is not arithmetic, such as texts, comparisons or attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if type(node.value) not in (int, float):
                raise TypeError(f"the expression must be of numbers, got {node.value!r}")
        elif type(node) not in (*_NODES, *_OPERATORS):
            raise ValueError(
                "an expression has numbers, brackets, + - * / // % **, and abs, min, max, round, got something else in "
                f"{expression!r}"
            )


def _bounded(bits: float) -> None:
    if bits > _MOST_BITS:
        raise ValueError(f"whole numbers must have at most {MOST_DIGITS:,} digits")


def _times(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        _bounded(a.bit_length() + b.bit_length())
    return a * b


def _power(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and b > 0:
        _bounded(b)  # before the multiplication below, for a huge exponent
        _bounded(math.log2(abs(a)) * b)
    return a**b


def _round(value: Any, places: int | None = None) -> Any:
    if places is None:
        return round(value)
    if abs(places) > MOST_PLACES:
        raise ValueError(f"a number is rounded to at most {MOST_PLACES} places, got {places}")
    return round(value, places)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _times,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max, "round": _round}
