"""Writes JSON-lines files, which survive a kill, and replaces other files as a whole."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from tpu_grpo.records.errors import DataError


def encode_line(record: Mapping[str, Any]) -> bytes:
    """Encode one record as a line of JSON, newline included.

    NaN and infinities, which JSON does not have, become null. A lone surrogate in a text is written as its escape,
    so that the file stays UTF-8 and the text still reads back as it was.
    """
    text = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def jsonable(value: Any) -> Any:
    """Return the value with numpy scalars as Python's and numbers that are not finite as None, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_records(path: Path, *, missing_ok: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, in order; a last line that a kill left torn is passed over.

    With ``missing_ok`` a file that is not there holds no records.

    Raises:
        DataError: for any other line that is not a JSON object.
    """
    if missing_ok and not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _parse(line)
            if record is not None:
                yield record
            elif file.read(1):
                raise DataError(
                    f"{path}:{number} must be one JSON object, got {line[:60]!r}; only the last line may be torn: "
                    "remove this line, or the file"
                )


def keep_records(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file with the records for which ``keep`` holds, as a whole or not at all; a missing file stays so.

    Raises:
        DataError: as ``read_records`` does; the file is then as it was.
    """
    if path.exists():
        with _replacing(path) as file:
            file.writelines(encode_line(record) for record in read_records(path) if keep(record))


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, as a whole or not at all; numbers that are not finite become null."""
    replace_text(path, json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_text(path: Path, text: str, temporary: str = ".tmp") -> None:
    """Write a UTF-8 file as a whole or not at all: a reader sees the old one or the new one.

    Until it is complete it is a file whose name ends in ``temporary``: one of each writer's own, if there are several.
    """
    with _replacing(path, temporary) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all."""
    with _replacing(path) as file:
        file.write(data)


@contextmanager
def _replacing(path: Path, suffix: str = ".tmp") -> Iterator[IO[bytes]]:
    """Open a temporary file that takes the place of ``path`` once it is complete and on disk."""
    temporary = path.with_name(path.name + suffix)
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # both a JSON and a UTF-8 error
        return None
    return record if isinstance(record, dict) else None
