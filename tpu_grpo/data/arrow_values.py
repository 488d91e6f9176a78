"""Converts the values of Arrow tables to those that the same records have as lines of JSON:

    JSON text "47+38=" with quotes    47+38=   datasets writes columns of mixed types as JSON texts
    float32 0.10000000149011612       0.1
    the time 2024-01-05 00:00:00      "2024-01-05"   datasets reads texts in JSON lines as times
    {"a": 1, "b": None} in a list     {"a": 1}   all mappings of an Arrow list have the same keys
    Decimal("18.90"), (("a", 1),)     18.9, {"a": 1}
"""

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_grpo.records.errors import DataError
from tpu_grpo.records.outside import parse_json

if TYPE_CHECKING:
    import pyarrow as pa

Convert = Callable[[Any], Any]
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.0|\.\d*[1-9])?(e[+-]\d+)?", re.ASCII)
"""Matches a number as JSON is written by programs."""


def conversion(kind: "pa.DataType", *, in_list: bool = False) -> Convert | None:
    """Return a function that converts the values of an Arrow type other than null; None if they stay as they are."""
    import pyarrow as pa  # a quarter of a second to import

    types = pa.types
    if isinstance(kind, pa.JsonType):
        return _json_value
    if isinstance(kind, pa.BaseExtensionType):
        return None
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return conversion(kind.value_type)
    if types.is_float16(kind) or types.is_float32(kind):
        scalar = np.float16 if types.is_float16(kind) else np.float32
        return lambda value: float(str(scalar(value)))
    if types.is_decimal(kind):
        return _number
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return _time
    if types.is_map(kind):
        item = conversion(kind.item_type) or _same
        return lambda value: {key: None if each is None else item(each) for key, each in value.items()}
    if types.is_struct(kind):
        fields = {field.name: conversion(field.type, in_list=in_list) or _same for field in kind.fields}
        if fields.get("content") is _json_value:
            fields["content"] = _content
        if not in_list and set(fields.values()) <= {_same}:
            return None
        return lambda value: {
            key: None if each is None else fields[key](each)
            for key, each in value.items()
            if each is not None or not in_list
        }
    if hasattr(kind, "value_type") and (item := conversion(kind.value_type, in_list=True)):  # lists of every kind
        return lambda value: [None if each is None else item(each) for each in value]
    return None


def _same(value: Any) -> Any:
    return value


def _json_value(text: str) -> Any:
    """Read JSON; datasets stores the texts 007 and 1.50 without quotes, but would not write a number so."""
    try:
        value = parse_json(text)
    except json.JSONDecodeError:
        return text
    return text if type(value) in (int, float) and not NUMBER.fullmatch(text) else value


def _content(text: str) -> Any:
    """Read the content of a message, which is a text or a list of parts."""
    value = _json_value(text)
    is_parts = isinstance(value, list) and all(isinstance(part, dict) for part in value)
    return value if is_parts or isinstance(value, str) else text


def _number(value: Decimal) -> int | float | str:
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _time(value: Any) -> str:
    text = value.isoformat()
    return text.removesuffix("T00:00:00")


# --- values that cannot be told ---------------------------------------------------------------------------------------


def check_values(table: "pa.Table", name: str) -> None:
    """Refuse values that datasets made of others when it read JSON lines; ``name`` names the data in errors.

    Raises:
        DataError: for a column of times of day, whose texts could have had several forms, or a column of whole numbers
            beyond 64 bits, which have become floats.
    """
    import pyarrow as pa
    from pyarrow import compute

    of_seconds = b"timestamp[s]" in (table.schema.metadata or {}).get(b"huggingface", b"")  # Parquet has none
    for column, values in zip(table.column_names, table.columns, strict=True):
        for leaf in _leaves(values):
            kind = leaf.type
            if pa.types.is_float64(kind):
                large = compute.greater_equal(compute.abs(leaf), 2.0**63)
                wrong = compute.and_(large, compute.all(compute.equal(compute.floor(leaf), leaf)))
                what = "whole numbers of 64 bits (this one may have lost digits)"
            elif pa.types.is_timestamp(kind) and kind.tz is None and (kind.unit == "s" or of_seconds):
                wrong = compute.not_equal(compute.floor_temporal(leaf, unit="day"), leaf)
                what = "texts (datasets has read them as times)"
            else:
                continue
            if len(found := leaf.filter(wrong)):
                raise DataError(
                    f"{name}: the column {column!r} must hold {what}, got {found[0].as_py()}; read the JSON lines "
                    "themselves as data.path, or save the column as texts"
                )


def _leaves(values: Any) -> Iterator[Any]:
    """Yield the arrays of values that are neither mappings nor lists, from an array of any type."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_struct(values.type):
        for index in range(values.type.num_fields):
            yield from _leaves(compute.struct_field(values, [index]))
    elif pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        yield from _leaves(compute.list_flatten(values))
    else:
        yield values
