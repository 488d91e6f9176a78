"""Writes and reads JSON files: JSON-lines files, which grow by lines, and files that are replaced as a whole.

A kill breaks at most the last line of a JSON-lines file. In a record any name may be missing, or have the value null.
"""

import errno
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tpu_grpo.records.errors import DataError
from tpu_grpo.records.untrusted_input import lines_of, open_file, parse_json, read_file

Record = Mapping[str, Any]


def encode_line(record: Record) -> bytes:
    """Encode one record as a line of JSON, newline included.

    NaN and infinities, which JSON does not have, become null. A lone surrogate in a text is written as its escape,
    so that the file stays UTF-8 and the text still reads back as it was.
    """
    text = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def jsonable(value: Any) -> Any:
    """Convert numpy scalars to Python's, and numbers that are not finite to None, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if hasattr(value, "dtype"):  # a scalar of NumPy, which is not imported for this
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def keep_steps(path: Path, last: int) -> None:
    """Rewrite a file atomically with only the records of steps up to ``last``; a missing file stays missing.

    If the last line is torn (cut off by a kill) and may belong to one of these steps, print that this line is lost.

    Raises:
        DataError: for a malformed line, as in `read_steps`; the file is then unchanged.
    """
    if not path.exists():
        return
    torn: list[bytes] = []
    replace_bytes(path, (encode_line(record) for record in read_steps(path, torn) if record["step"] <= last))
    for line in torn:
        found = re.match(rb'{"step": ?(\d{1,18})\D', line)
        if found is None or int(found[1]) <= last:
            of = f" of step {int(found[1])}" if found else ""
            print(f"{path}: its last line{of} was torn, as by a full disk, and is lost", file=sys.stderr, flush=True)


def write_json(path: Path, value: Any, temporary: str = ".tmp") -> None:
    """Write a value atomically as indented JSON; numbers that are not finite become null. See ``replace_bytes``."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    replace_text(path, text + "\n", temporary)


def replace_text(path: Path, text: str, temporary: str = ".tmp") -> None:
    """Write a UTF-8 file atomically; see ``replace_bytes``."""
    replace_bytes(path, [text.encode("utf-8", errors="backslashreplace")], temporary)


def replace_bytes(path: Path, data: Iterable[bytes], temporary: str = ".tmp") -> None:
    """Write a file atomically: a reader sees either the old file or the complete new file.

    Until the new file is complete, its name ends in ``temporary``; concurrent writers need different endings.
    """
    unfinished = path.with_name(path.name + temporary)
    with unfinished.open("wb") as file:
        file.writelines(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read_json(path: Path, **types: type) -> dict[str, Any]:
    """Read a JSON file that a run has written: an object in which each name in ``types`` has a value of that type.
    Raises DataError if the file holds anything else, or is none."""
    try:
        found = parse_json(read_file(path))
    except (ValueError, OSError):  # invalid JSON or UTF-8, or not a file
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path} must hold a JSON object, as a run writes it, and does not; restore or remove it")
    for name, kind in types.items():
        if type(value := found.get(name)) is not kind:
            raise DataError(f"{path} must hold {name}, a value of {kind.__name__}, got {value!r}; restore or remove it")
    return found


def read_records(path: Path, *, missing_ok: bool = False, torn: list[bytes] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, in order. A last line that a kill cut off is appended to ``torn`` instead.

    With ``missing_ok`` a missing file has no records.

    Raises:
        DataError: for any other line that is not a JSON object.
    """
    if missing_ok and not path.exists():
        return
    try:
        opened = open_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EISDIR, errno.ELOOP):
            raise
        raise DataError(f"{path} must be a file of JSON objects, one a line, got {error}; remove it") from error
    with opened as file:
        for number, line in enumerate(lines_of(file, str(path)), start=1):
            try:
                record = parse_json(line)
            except ValueError:  # both a JSON and a UTF-8 error
                record = None
            if isinstance(record, dict):
                yield record
            elif file.read(1):
                raise DataError(
                    f"{path}:{number} must be one JSON object, got {line[:60]!r}; only the last line may be torn: "
                    "remove this line, or the file"
                )
            elif torn is not None:
                torn.append(line)


def read_steps(path: Path, torn: list[bytes] | None = None, **types: type) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, in which ``step`` must be an int and every name in ``types`` of the given type.

    Raises:
        DataError: as ``read_records`` does, and for a line in which one of these names is missing or has another type.
    """
    for record in read_records(path, missing_ok=True, torn=torn):
        for name, kind in {"step": int, **types}.items():
            if type(value := record.get(name)) is not kind:
                raise DataError(
                    f"{path}: every line must hold {name}, a value of {kind.__name__}, got {value!r}; restore or "
                    "remove the file"
                )
        yield record
