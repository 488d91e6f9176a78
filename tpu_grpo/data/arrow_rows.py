"""Reads the rows of Arrow tables, with the values that the same records have as lines of JSON. A time becomes a text,
and midnight a date, because datasets reads the text 2024-01-05 as a time. A null in a list's mapping is left out,
because Arrow gives all mappings of a list the same keys."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tpu_grpo.data.lazy_records import ROWS, Lazy, Record
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.untrusted_input import parse_json

NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.0|\.\d*[1-9])?(e[+-]\d+)?", re.ASCII)  # as programs write JSON


class ArrowRows(Lazy):
    """The rows of an Arrow table, with the values that they would have as lines of JSON. Errors show its ``name``."""

    def __init__(self, table: Any, name: str):
        if not table.num_rows:
            raise DataError(f"{name} must hold at least one record, got none")
        self._table = table.drop_columns([c for c in table.column_names if c.startswith("__index_level_")])  # of pandas
        self._maps = "lossy" if "map<" in str(table.schema.types) else None  # mappings take ten times as long
        self._conversions = {f.name: conversion(f.type, f"{name}: the column {f.name!r}") for f in self._table.schema}

    def __len__(self) -> int:
        return self._table.num_rows

    def at(self, index: int) -> Record:
        """Read one row."""
        return next(self._between(index, 1))

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), ROWS):
            yield from self._between(start, ROWS)

    def _between(self, first: int, count: int) -> Iterator[Record]:
        for row in self._table.slice(first, count).to_pylist(maps_as_pydicts=self._maps):
            yield {column: converted(value, self._conversions[column]) for column, value in row.items()}


def conversion(kind: Any, where: str, *, in_list: bool = False) -> Callable[[Any], Any] | None:
    """Return a function that converts values of an Arrow type other than null, None if they stay as they are. It raises
    DataError for a number that may have lost digits, with ``where``, the name of the column."""
    import pyarrow as pa  # a quarter of a second to import

    types = pa.types
    if isinstance(kind, pa.JsonType):
        return _from_json
    if types.is_float32(kind):
        return lambda value: float(str(np.float32(value)))
    if types.is_float64(kind):
        return partial(_checked, where=where)
    if types.is_decimal(kind):
        return lambda value: int(value) if value == int(value) else float(value)
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return lambda value: value.isoformat().removesuffix("T00:00:00")
    if types.is_struct(kind):
        fields = {field.name: conversion(field.type, where, in_list=in_list) for field in kind.fields}
        if fields.get("content") is _from_json:
            fields["content"] = _content
        return lambda value: {k: converted(v, fields[k]) for k, v in value.items() if v is not None or not in_list}
    if types.is_nested(kind) and hasattr(kind, "value_type"):
        item = conversion(kind.value_type, where, in_list=True)
        return item and (lambda value: [converted(each, item) for each in value])
    return None


def converted(value: Any, convert: Callable[[Any], Any] | None) -> Any:
    """Return a value as a function of `conversion` converts it."""
    return value if value is None or convert is None else convert(value)


def _from_json(text: str) -> Any:
    """Read JSON, but keep texts such as 007 and 1.50, which datasets stores without quotes."""
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return text if type(value) in (int, float) and not NUMBER.fullmatch(text) else value


def _content(text: str) -> Any:
    """Read the content of a message, which is a text or a list of parts."""
    value = _from_json(text)
    return value if isinstance(value, str) or str(value).startswith("[{") else text


def _checked(value: float, where: str) -> float:
    if abs(value) >= 2**63 and len(f"{value!r}".partition("e")[0]) > 16:
        remedy = "it may have been a whole number with more digits: read the lines of JSON, or save the column as texts"
        raise DataError(f"{where} must hold numbers of 64 bits, got {value!r}; {remedy}")
    return value
