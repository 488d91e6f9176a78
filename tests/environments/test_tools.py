"""What tools give becomes a message to the policy."""

import asyncio
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from tests.goldens import labelled
from tpu_grpo.environments.actions import ToolCall
from tpu_grpo.environments.tool_values import MOST_BYTES, WrongError, called

LABELLED = Path(__file__).with_name("labelled.txt")


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


class Point(TypedDict):
    x: int
    name: NotRequired[str]


class Own(dict[str, Any]):
    pass


class Typed:
    def integer(self, a: int) -> str:
        return repr(a)

    def number(self, a: float) -> str:
        return repr(a)

    def text(self, a: str) -> str:
        return repr(a)

    def boolean(self, a: bool) -> str:
        return repr(a)

    def maybe(self, a: int | None = 1) -> str:
        return repr(a)

    def either(self, a: int | str) -> str:
        return repr(a)

    def numbers(self, a: list[int | None]) -> str:
        return repr(a)

    def choice(self, a: Literal["up", 2]) -> str:
        return repr(a)

    def point(self, a: Point) -> str:
        return repr(a)

    def points(self, a: dict[str, list[Point]]) -> str:
        return repr(a)

    def mapping(self, a: dict) -> str:
        return repr(a)

    def own(self, a: Own) -> str:
        return repr(a)

    def anything(self, a: Any) -> str:
        return repr(a)

    def untyped(self, a) -> str:
        return repr(a)


@pytest.mark.parametrize(
    ("tool", "written", "got"), [*labelled(LABELLED, "arguments"), ("integer", 10**3000, repr(10**3000))]
)
def test_arguments_are_what_their_type_hints_say(tool: str, written: Any, got: str) -> None:
    message, is_error = asyncio.run(called(Typed(), {tool: None}, ToolCall(tool, {"a": written})))
    assert (message["content"], is_error) == (got, False)


@pytest.mark.parametrize(
    ("tool", "written", "problem"),
    [
        *labelled(LABELLED, "problems"),
        ("integer", "9" * 5000, "Unable to parse input string as an integer, exceeded maximum size, got '999"),
    ],
)
def test_an_argument_of_another_type_is_an_error_that_the_policy_sees(tool: str, written: Any, problem: str) -> None:
    message, is_error = asyncio.run(called(Typed(), {tool: None}, ToolCall(tool, {"a": written})))
    assert message["content"].startswith(f"Error: the argument 'a' does not fit: {problem}")
    assert is_error


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
