"""Records are read from one file here: JSON lines, Parquet or CSV."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpu_grpo.errors import DataError
from tpu_grpo.prompts.checks import check_keys

Records = list[dict[str, Any]]


def read_file(path: Path, setting: str) -> Records:
    """Read all records of a .jsonl, .parquet or .csv file; errors say that ``setting`` gave the path.

    Raises:
        DataError: for a file that is missing, empty or not readable, or a line that does not fit; names file and line.
    """
    if path.suffix not in READERS:
        raise DataError(
            f"{setting} must be a {', '.join(READERS)} file, the directory of a Hugging Face dataset, hf:NAME, "
            f"reasoning_gym:TASK, path.py:function or builtin:addition, got {path}"
        )
    try:
        return READERS[path.suffix](path, setting)
    except FileNotFoundError:
        raise DataError(f"{setting}: data file not found: {path} (relative to {Path.cwd()}); correct it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{setting}: {path} must be readable UTF-8, got {type(error).__name__}: {error}") from error


def _read_jsonl(path: Path, setting: str) -> Records:
    """Read one JSON object per line, all with the same keys."""
    with path.open(encoding="utf-8-sig") as file:  # with or without a byte-order mark
        lines = list(file)
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise DataError(f"{setting}: {path} must hold at least one record, got none; write one JSON object a line")
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    for number, record in enumerate(records, start=1):
        check_keys(record, records[0], f"{path}:{number}", "line 1")
    return records


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        what = "an empty line" if not line.strip() else f"{error.msg} at column {error.colno}"
        raise DataError(f"{where} must be a JSON object, got {what}") from None
    if not isinstance(record, dict) or not record:
        got = "an empty one" if record == {} else f"a {type(record).__name__}"
        raise DataError(f"{where} must be a JSON object with a key per column, got {got}")
    return record


def _read_csv(path: Path, setting: str) -> Records:
    """Read a header line and then records; every value is a text, so that an answer 007 stays one."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            rows = [(reader.line_num, row) for row in reader if row]
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num} must be CSV, got: {error}; check its quotes") from None
    if len(rows) < 2:
        raise DataError(f"{setting}: {path} must hold a header and at least one record, got {len(rows)} lines")
    header = rows[0][1]
    if wrong := sorted({name for name in header if not name.strip() or header.count(name) > 1}):
        raise DataError(f"{path}:1 must name every column once, got {wrong} in {header}; mend the header")
    for number, row in rows[1:]:
        if len(row) != len(header):
            raise DataError(f"{path}:{number} must have a value for each of {header}, got {len(row)}: {row}")
    return [dict(zip(header, row, strict=True)) for _, row in rows[1:]]


def _read_parquet(path: Path, setting: str) -> Records:
    import pyarrow as pa  # a quarter of a second to import
    from pyarrow import parquet

    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        records = parquet.read_table(path).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{setting}: {path} must be a Parquet file, got {type(error).__name__}: {error}") from error
    if not records:
        raise DataError(f"{setting}: {path} must hold at least one record, got none")
    return records


READERS: Mapping[str, Callable[[Path, str], Records]] = MappingProxyType(
    {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}
)
"""The file's suffix decides which of these reads it."""
