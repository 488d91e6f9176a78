"""Every section of a config is built on `Section`; several settings share these types of value."""

import datetime
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

PositiveInt = Annotated[int, Field(ge=1)]
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Such a name can be part of a file's name: it has letters, digits, dot, dash and underscore."""


class Section(BaseModel):
    """A part of the config; it is frozen and refuses keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _switches_are_not_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and bool not in _kinds(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError(f"must not be a switch, got {str(value).lower()}; `--help` lists what it takes")
        return value


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the types a setting may have: ``bool | None`` has two."""
    return get_args(annotation) or (annotation,)


class BareSwitch(str):
    """This text is yes, no, on or off without quotes: YAML 1.1 reads a switch there, YAML 1.2 a text."""

    __slots__ = ()


def _refuse_bare_switches(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if (found := next(_bare_switches(value), None)) is not None:
            raise ValueError(f"must say true or false, or put a text in quotes, got {name}: {found}")
    return options


def _bare_switches(value: Any) -> Iterator[str]:
    match value:
        case BareSwitch():
            yield value
        case list():
            for entry in value:
                yield from _bare_switches(entry)
        case dict():
            yield from _bare_switches(list(value.values()))


Options = Annotated[dict[str, Any], AfterValidator(_refuse_bare_switches)]
"""Keyword arguments take no bare switch: any text is true to Python, so that ``strict: no`` would mean yes."""


def _check_day(value: str) -> str:
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) is None:
            raise ValueError("such as 2024-07-26")
        datetime.date.fromisoformat(value)
    except ValueError as error:
        raise ValueError(f"must be a day as YYYY-MM-DD, got {value!r} ({error}); correct it") from None
    return value


Day = Annotated[str, AfterValidator(_check_day)]
"""People write a day like this: 2024-07-26."""


def regular_expression(text: str, example: str) -> str:
    """Return the text if it is a regular expression.

    Raises:
        ValueError: if it is none; ``example`` shows one.
    """
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"must be a regular expression, got {text!r} ({error}); an example: {example}") from error
    return text


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers that are named, ascending, each once: ``"28-29, 0"`` -> ``(0, 28, 29)``.

    Both ends belong to a range.

    Raises:
        ValueError: for anything else than numbers and ranges between commas, or a range that ends before it starts.
    """
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if found is None:
            raise ValueError(f"must name layers like 20-31 or 0-3,28-31, got {text!r}; layers are counted from 0")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"must give ranges from low to high, got {part.strip()!r}; write {last}-{first}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value  # YAML's 5 is a number


def _check_layers(value: str) -> str:
    parse_layers(value)
    return value


LayerRanges = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_layers)]
"""People write ranges of layers like this: 20-31, or 0-3,28-31, or 5."""


def _check_count(value: Any) -> Any:
    if value != "auto" and (not isinstance(value, int) or value < 1):
        raise ValueError(f"must be auto or a whole number from 1 on, got {value!r}; `--help` says what it means")
    return value


AutoOrCount = Annotated[Literal["auto"] | int, BeforeValidator(_check_count)]
"""The number is chosen for the run unless it is given."""
