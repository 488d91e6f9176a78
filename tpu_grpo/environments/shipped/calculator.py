"""Calculators: one that adds, which the demo's model learns to call, and one that computes expressions."""

import ast
from collections.abc import Callable
from typing import Any

from simpleeval import DEFAULT_OPERATORS, SimpleEval

_KNOWN = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd)
_OPERATORS = {node: DEFAULT_OPERATORS[node] for node in _KNOWN}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max, "round": round}


class Calculator:
    """A calculator that can add."""

    def reset(self, **columns: Any) -> None:
        """Begin an episode; there is nothing to say."""

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
        return a + b


class Arithmetic:
    """A calculator for whole expressions."""

    def reset(self, **columns: Any) -> None:
        """Begin an episode; there is nothing to say."""

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression, such as (3 + 4) * 12.5 / 7.

        Args:
            expression: Numbers, brackets, + - * / // % **, and abs, min, max, round.

        Returns:
            The value.
        """
        written = expression.replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
        try:
            value = SimpleEval(operators=_OPERATORS, functions=_FUNCTIONS, names={}).eval(written)
        except KeyError:  # how simpleeval says that there is no such operator
            raise ValueError(f"the operators are + - * / // % and **, got another in {expression!r}") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"the expression must be of numbers, got {value!r}")
        return str(value)
