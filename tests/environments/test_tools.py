"""What tools give becomes a message to the policy."""

import asyncio
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from tpu_grpo.environments.actions import ToolCall
from tpu_grpo.environments.tool_values import MOST_BYTES, WrongError, called


class Tools:
    def give(self, what: str) -> Any:
        return {
            "number": 10**5000,
            "numbers": [1, {"n": -(10**5000)}],
            "most": "x" * MOST_BYTES,
            "more": "x" * (MOST_BYTES + 1),
            "wide": "\N{EURO SIGN}" * MOST_BYTES,
            "object": object(),
            "objects": {"a": [object()]},
            "generator": (n for n in ()),
            "bytes": b"abc",
            "complex": (-8) ** 0.5,
            "decimal": [Decimal("0.10"), date(2026, 1, 2)],
            "set": {"a"},
        }[what]


def given(what: str) -> tuple[str, bool]:
    message, is_error = asyncio.run(called(Tools(), {"give": None}, ToolCall("give", {"what": what})))
    return message["content"], is_error


@pytest.mark.parametrize("what", ["number", "numbers"])
def test_a_number_that_python_does_not_write_is_an_error_that_the_policy_sees(what: str) -> None:
    """A policy can have a tool compute one, and must not end its run with it."""
    text, is_error = given(what)
    assert text.startswith("Error: ValueError: Exceeds the limit (4300 digits)")
    assert is_error


def test_a_long_text_is_cut() -> None:
    assert given("most") == ("x" * MOST_BYTES, False)
    assert given("more") == ("x" * (MOST_BYTES - 6) + " [...]", False)
    text, _ = given("wide")  # three bytes each
    assert text == "\N{EURO SIGN}" * ((MOST_BYTES - 6) // 3) + " [...]"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("complex", "(1.7319121124709868e-16+2.8284271247461903j)"),
        ("decimal", "[Decimal('0.10'), datetime.date(2026, 1, 2)]"),
        ("set", "{'a'}"),
    ],
)
def test_whatever_has_a_text_is_told(what: str, text: str) -> None:
    """As TRL's trainer does it. A policy that asks for the root of -8 gets a complex number, and its run goes on."""
    assert given(what) == (text, False)


@pytest.mark.parametrize("what", ["object", "objects", "generator", "bytes"])
def test_what_has_no_text_is_the_environments_fault(what: str) -> None:
    """Where an object lies in memory is another place in every run."""
    with pytest.raises(WrongError, match="must give a text, or what has one, got .* from the tool give; return a str"):
        given(what)
