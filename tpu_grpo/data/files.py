"""Records are read from files here, one or several, of any of the formats."""

import errno
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from tpu_grpo.data.checks import check_keys
from tpu_grpo.data.formats import READERS, Reader
from tpu_grpo.data.locations import Location, expand
from tpu_grpo.data.records import Joined, Record, Records
from tpu_grpo.records.errors import DataError

GLANCED_BYTES = 20_000_000
"""Of a larger file that has to be read or unpacked whole, the first record is not looked at beforehand."""
OTHER_KINDS = (
    "the directory of a Hugging Face dataset, hf:NAME, reasoning_gym:TASK, path.py:function or builtin:addition"
)


def read_files(paths: Iterable[str], setting: str) -> Records:
    """Check all records of some files, and return them to be read when they are asked for.

    ``setting`` gave the paths, each of which may be a pattern or an address, with or without the suffix of a packed
    file.

    Raises:
        DataError: for a file that is missing, empty or not readable, or a line that does not fit; names file and line.
        ConfigError: for an address that needs a package which is not installed.
    """
    locations = [location for path in paths for location in expand(path, setting)]
    for location in locations:
        _reader(location)
    parts = [_read(location, lambda place: _reader(place).all(place.open(), place)) for location in locations]
    for location, part in zip(locations[1:], parts[1:], strict=True):
        check_keys(part[0], parts[0][0], f"the first record of {location.name}", f"{locations[0].name}")
    return parts[0] if len(parts) == 1 else Joined(parts)


def first_record(paths: Iterable[str], setting: str) -> Record | None:
    """Read the first record of some files, and see that the others are there; None for an address, which takes time.

    Raises:
        DataError, ConfigError: as `read_files` does, as far as the first record shows it.
    """
    locations = [location for path in paths for location in expand(path, setting)]
    for location in locations:
        _reader(location)
        if not location.is_remote:
            _read(location, lambda place: place.path.open("rb").close())
    first = locations[0]
    whole = _reader(first).whole or first.packed
    if first.is_remote or (whole and first.path.stat().st_size > GLANCED_BYTES):
        return None
    return _read(first, lambda place: next(_reader(place).some(place.open(), place)))


def is_file_name(path: str) -> bool:
    """Say whether a path ends as the files that are read here do."""
    return Location(path, "").suffix in READERS


def _reader(location: Location) -> Reader:
    if location.suffix in READERS:
        return READERS[location.suffix]
    raise DataError(
        f"{location.setting} must be a {', '.join(READERS)} file (also packed, as .jsonl.gz), {OTHER_KINDS}, got "
        f"{location.name}{_hint(location)}"
    )


def _read[Result](location: Location, action: Callable[[Location], Result]) -> Result:
    """Do something with a file, and say of errors which setting it comes from."""
    path, setting = location.name, location.setting
    try:
        return action(location)
    except FileNotFoundError:
        where = "" if location.is_remote else f" (relative to {Path.cwd()})"
        raise DataError(f"{setting}: data file not found: {path}{where}; correct it{_hint(location)}") from None
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # of a temporary copy
            raise
        raise DataError(f"{setting}: {path} must be readable UTF-8, got {type(error).__name__}: {error}") from error


def _hint(location: Location) -> str:
    """Guess what a name without a file may have meant."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", location.name) and location.suffix not in READERS:
        return f"; did you mean hf:{location.name}, a dataset of the Hugging Face hub?"
    return ""
