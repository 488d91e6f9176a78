"""Holds tables as pages show them: every cell a text, numbers to the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpu_grpo.observe.metrics.lines import is_number

HEAD_CHARACTERS, TAIL_CHARACTERS = 1400, 500
"""Of a longer text so much is shown, from its beginning and from its end."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    label: str
    is_number: bool = False
    colour: int | None = None
    """The colour of the run that the column is of."""


@dataclass(frozen=True)
class Said:
    """A piece of a conversation."""

    text: str
    by: str = ""
    """Who said it; nothing for the policy."""
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    note: str = ""
    is_best: bool = False
    colour: int | None = None
    """The colour of the run that the cell names."""
    said: Sequence[Said] = ()
    """A conversation in place of the text."""


@dataclass(frozen=True)
class Table:
    """A table; every row has a cell for each column."""

    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


def shorten(text: str, head: int = HEAD_CHARACTERS, tail: int = TAIL_CHARACTERS) -> str:
    """Leave out the middle of a long text, and say how much that is."""
    left_out = len(text) - head - tail
    if left_out <= 0:
        return text
    return f"{text[:head]}\n… {left_out:,} characters left out …\n{text[-tail:]}"


def decimal(value: Any, form: str = ".2f") -> str:
    """Write a number, or a dash where there is none."""
    return format(value, form) if is_number(value) else "–"
