"""A number that is chosen for a run unless it is given."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator


def _check_count(value: Any) -> Any:
    if value != "auto" and (not isinstance(value, int) or value < 1):
        raise ValueError(f"must be auto or a whole number from 1 on, got {value!r}; `--help` says what it means")
    return value


AutoOrCount = Annotated[Literal["auto"] | int, BeforeValidator(_check_count)]
"""Auto, or a whole number from 1 on."""
