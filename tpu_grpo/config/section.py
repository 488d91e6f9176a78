"""The base class `Section` of all sections of a config, and value types that several settings share."""

import datetime
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator


class Section(BaseModel):
    """A part of the config; frozen, and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (get_args(kind) or (kind,)):  # ``bool | None`` has two args
            got, choices = str(value).lower(), get_args(kind) if get_origin(kind) is Literal else ()
            rule = f"be {', '.join(choices[:-1])} or {choices[-1]}" if choices else "not be a switch"
            raise ValueError(f"must {rule}, got {got}; `--help all` lists what every setting takes")
        if isinstance(value, str) and re.search(r"[\0\ud800-\udfff]", value):
            raise ValueError(f"must be text without NUL and halves of surrogate pairs, got {value!r:.200}; correct it")
        return value


def must(message: str, holds: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a validator that raises ValueError unless ``holds(value)`` or the value is None. The error's text is
    ``message`` formatted with the value."""

    def check(value: Any) -> Any:
        if value is not None and not holds(value):
            raise ValueError(f"must {message.format(list(value) if isinstance(value, tuple) else value)}")
        return value

    return check


PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
"""A name that can be part of a file name: letters, digits, dot, dash and underscore."""

AutoOrCount = Annotated[
    Literal["auto"] | int,
    BeforeValidator(
        must(
            "be auto or a whole number from 1 on, below 2**31, got {!r}; `--help all` says what it means",
            lambda value: value == "auto" or (isinstance(value, int) and 1 <= value < 2**31),
        )
    ),
]
"""A positive number, or auto, with which the run chooses the number."""


class BareSwitch(str):
    """An unquoted yes, no, on or off, which YAML 1.1 reads as a boolean, and YAML 1.2 as text."""

    __slots__ = ()


def _refuse_bare_switches(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if (found := next(_bare_switches(value), None)) is not None:
            raise ValueError(f"must say true or false, or put a text in quotes, got {name}: {found}")
    return options


def _bare_switches(value: Any) -> Iterator[str]:
    if isinstance(value, BareSwitch):
        yield value
    elif isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _bare_switches(entry)


Options = Annotated[dict[str, Any], AfterValidator(_refuse_bare_switches)]
"""Keyword arguments; bare switches are refused, because as text ``strict: no`` would be true in Python."""


def _check_day(value: str) -> str:
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) is None:
            raise ValueError("such as 2024-07-26")
        datetime.date.fromisoformat(value)
    except ValueError as error:
        raise ValueError(f"must be a day as YYYY-MM-DD, got {value!r} ({error}); correct it") from None
    return value


Day = Annotated[str, AfterValidator(_check_day)]
"""A day, such as 2024-07-26."""


def expression(example: str) -> AfterValidator:
    """Return a validator for regular expressions; its message shows ``example``."""

    def check(text: str) -> str:
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"must be a regular expression, got {text!r:.200} ({error}); an example: {example}"
            ) from error
        return text

    return AfterValidator(check)


def parse_layers(text: str) -> tuple[int, ...]:
    """Parse layer numbers into a sorted tuple without duplicates: ``"28-29, 0"`` -> ``(0, 28, 29)``.

    A range includes both ends.

    Raises:
        ValueError: for anything but numbers and ranges separated by commas, or a range that ends before it starts.
    """
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if found is None:
            raise ValueError(f"must name layers like 20-31 or 0-3,28-31, got {text!r}; layers are counted from 0")
        first, last = int(found[1]), int(found[2] or found[1])
        if last >= 10_000:
            raise ValueError(f"must name layers below 10000, got {last}; no model has more")
        if last < first:
            raise ValueError(f"must give ranges from low to high, got {part.strip()!r}; write {last}-{first}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


LayerRanges = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),  # YAML reads 5 as a number
    AfterValidator(lambda value: parse_layers(value) and value),
]
"""Ranges of layers, such as 20-31, or 0-3,28-31, or 5."""
