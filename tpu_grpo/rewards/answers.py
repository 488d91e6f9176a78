"""What passes between a reward and its caller, also across processes; and what counts as a number."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

SHORT = reprlib.Repr(maxstring=120, maxother=120)


@dataclass(frozen=True)
class Call:
    """How a reward is found and called; passes between processes."""

    name: str
    """As shown in metrics."""
    source: str
    """As named in the config."""
    passed: Mapping[str, Any] = field(default_factory=dict)
    """Options passed by name, to the function or to a class's constructor."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """All options, for a function that declares ``options``."""
    extras: tuple[str, ...] = ()
    concurrency: int | None = None
    """For a function of one row, how many at a time if it is async; None for a function of a batch."""
    is_async: bool = False
    messages: bool = False
    search: bool = True
    """Whether to find out which row makes a reward of a batch raise."""


@dataclass(frozen=True)
class Batch:
    """What a reward is asked about."""

    columns: Mapping[str, Sequence[Any]]
    """Its arguments by name, each [size]; and completion_ids where it asks for them."""
    step: int
    size: int


@dataclass(frozen=True)
class Problem:
    """Something a reward did instead of giving a number."""

    kind: Literal["raised", "late", "died", "wrong"]
    text: str
    """What happened, to go behind the reward's name."""
    row: int | None = None
    """The row concerned; all of the batch when None."""
    culprit: int | None = None
    """The row that raises on its own, where all are concerned and one was found."""
    trace: str = ""


@dataclass(frozen=True)
class Answer:
    """Values of a batch, NaN where the reward does not apply or a problem is, with the problems."""

    values: list[float]
    problems: list[Problem] = field(default_factory=list)
    logged: dict[str, list[float]] = field(default_factory=dict)


def failed(size: int, problem: Problem) -> Answer:
    """No values at all."""
    return Answer([math.nan] * size, [problem])


def judge(values: Any, expected: int) -> tuple[list[float], list[Problem]]:
    """Numbers out of what a reward returned, NaN for None; and the problems with it."""
    found = _length(values)
    if found != expected:
        got = f"a {type(values).__name__}" if found is None else f"{found} values"
        text = f"must return a list of one number (or None) per completion, {expected} here, got {got}"
        return [math.nan] * expected, [Problem("wrong", text)]
    numbers, problems = [], []
    for row, value in enumerate(values):
        number = number_or_none(value)
        if number is None:
            text = f"must return finite numbers (or None where it does not apply), got {SHORT.repr(value)}"
            problems.append(Problem("wrong", text, row))
        numbers.append(math.nan if number is None else number)
    return numbers, problems


def _length(values: Any) -> int | None:
    """Length of something list-like; None for anything else, generators, text, sets and mappings included."""
    if isinstance(values, str | bytes | set | frozenset | Mapping) or not hasattr(values, "__len__"):
        return None
    if getattr(values, "shape", (0,)) == ():
        return None
    return len(values)


def number_or_none(value: Any) -> float | None:
    """A finite number, NaN for None, or None for anything else."""
    if value is None:
        return math.nan
    if getattr(value, "shape", None) == ():
        value = value.item()  # a scalar of numpy or jax
    try:
        number = float(value) if isinstance(value, Real) else math.inf
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else None
