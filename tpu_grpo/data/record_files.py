"""Reads records from files: finds the files that a path names, reads each format, and explains errors.

data/*.jsonl             every file that matches, sorted by name
train.jsonl.gz           a compressed file
https://..., gs://...    read through fsspec, once, when the run starts
"""

import csv
import errno
import glob
import io
import json
import lzma
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from tpu_grpo.config.plugins import EXTRAS, need
from tpu_grpo.data.lazy_records import (
    Joined,
    JsonLines,
    Record,
    Records,
    check_keys,
    checked,
    json_lines,
    kept,
    reading,
)
from tpu_grpo.records.errors import ConfigError, DataError, disk_error
from tpu_grpo.records.untrusted_input import lines_of, open_file, parse_json

PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}
"""fsspec's name for a file's compression, by the suffix of the file."""
FILE_SYSTEMS = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "s3a": "s3fs", "abfs": "adlfs", "az": "adlfs"}
"""The package that fsspec needs for each URL scheme."""
VARIABLE = re.compile(r"\$\{?(\w+)", re.ASCII)
"""Finds the environment variables in a URL."""
BLOCK = 2**20
LARGEST_LIST = 2**32
"""The most bytes of a JSON list, which is read as a whole."""
GLANCED_BYTES = 20_000_000
"""The most bytes of a file that `first_record` reads or unpacks as a whole."""
NOT_OF_THE_FILE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""The errors of a full disk, which has no room for a temporary copy, and of too many open files."""
OTHER_KINDS = (
    "the directory of a Hugging Face dataset, hf:NAME, reasoning_gym:TASK, path.py:function or builtin:addition"
)


@dataclass(frozen=True)
class Location:
    """One file, on this machine or on the network."""

    name: str
    setting: str

    @property
    def is_remote(self) -> bool:
        """Whether the file's name is a URL."""
        return is_address(self.name)

    @property
    def path(self) -> Path:
        """Return the path of a local file."""
        return Path(self.name).expanduser()

    @property
    def suffix(self) -> str:
        """Return the suffix that selects the reader: .jsonl for train.jsonl.gz."""
        return os.path.splitext(self._without_query.removesuffix(self.packed))[1]

    @property
    def packed(self) -> str:
        """Return the suffix of a compressed file, such as .gz; empty for other files."""
        return next((suffix for suffix in PACKED if self._without_query.endswith(suffix)), "")

    @property
    def _without_query(self) -> str:
        return self.name.partition("?")[0] if self.is_remote else self.name

    @property
    def address(self) -> str:
        """Return the URL with its environment variables filled in; it may hold a password, so never show it. Raises
        ConfigError for an environment variable that is not set."""
        if missing := [name for name in re.findall(VARIABLE, self.name) if name not in os.environ]:
            raise ConfigError(f"{self.setting}: {self.name} needs the variable {missing[0]}; set it")
        return os.path.expandvars(self.name)

    def open(self) -> IO[bytes]:
        """Open the decompressed content as a local file: the file itself, or a temporary copy.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: for a URL that needs a package which is not installed.
            DataError: for a URL that does not answer, or a file that cannot be unpacked.
        """
        if not self.is_remote and not self.packed:
            return open_file(self.path)
        if not self.is_remote:
            open_file(self.path).close()  # raises if it is not a file
        copy = tempfile.TemporaryFile(prefix="tpu_grpo_data_")  # noqa: SIM115  # lives as long as the records
        with _explained(self):
            import fsspec

            with fsspec.open(
                self.address if self.is_remote else str(self.path), "rb", compression=PACKED.get(self.packed)
            ) as opened:
                source: Any = opened
                size = 0 if self.packed else getattr(source, "size", None) or 0
                with reading(f"fetching {self.name}", size, "bytes") as advance:
                    is_lined = self.packed and self.suffix in (".jsonl", ".ndjson", ".csv", ".tsv")
                    blocks = lines_of(source, self.name) if is_lined else iter(lambda: source.read(BLOCK), b"")
                    for block in blocks:
                        copy.write(block)
                        advance(copy.tell())
        copy.flush()
        copy.seek(0)
        return copy


def is_address(name: str) -> bool:
    """Whether a path is a URL for fsspec, such as gs://bucket/train.jsonl."""
    return "://" in name


def expand(name: str, setting: str) -> list[Location]:
    """Return the files that a path names, sorted if it is a pattern; raises DataError if no file matches it."""
    if not any(sign in name for sign in "*?[") or (not is_address(name) and Path(name).expanduser().exists()):
        return [Location(name, setting)]
    if is_address(name):
        if name.startswith(("http://", "https://")):
            return [Location(name, setting)]  # a question mark begins a query there
        with _explained(Location(name, setting)):
            import fsspec

            system, path = fsspec.core.url_to_fs(Location(name, setting).address)
            found = sorted(_hidden(name, system.unstrip_protocol(each)) for each in system.glob(path))
    else:
        found = sorted(glob.glob(str(Path(name).expanduser()), recursive=True))
    files = [Location(each, setting) for each in found]
    if not files:
        raise DataError(f"{setting}: no file fits the pattern {name} (relative to {Path.cwd()}); correct it")
    return files


@contextmanager
def _explained(location: Location) -> Iterator[None]:
    """Convert errors of fsspec, of its file systems and of unpacking into errors that users can act on."""
    scheme = location.name.partition("://")[0]
    try:
        yield
    except (FileNotFoundError, ConfigError, DataError):
        raise
    except ImportError as error:
        package = FILE_SYSTEMS.get(scheme, "the package that it names")
        if package in EXTRAS:
            need(package, f"{location.setting}: {location.name}", ConfigError)
        raise ConfigError(
            f"{location.setting}: {location.name} needs a package that is not installed ({error}); install {package}"
        ) from error
    except Exception as error:
        if not location.is_remote and not isinstance(error, (OSError, EOFError, zlib.error, lzma.LZMAError)):
            raise
        if isinstance(error, OSError) and disk_error(error) is not None and not location.is_remote:
            raise
        remedy = "see that it can be reached from here" if location.is_remote else "copy or pack it again"
        told = _hidden(location.name, str(error)) if location.is_remote else str(error)
        raise DataError(
            f"{location.setting}: {location.name} must be readable, got {type(error).__name__}: {told}; {remedy}"
        ) from error


def _hidden(name: str, text: str) -> str:
    """Write the environment variables in a URL's ``name`` in place of their values, which may be passwords."""
    for variable in re.findall(VARIABLE, name):
        if value := os.environ.get(variable):
            text = text.replace(value, f"${{{variable}}}")
    return text


# --- formats ---------------------------------------------------------------------------------------------------------


def _json_lines(file: IO[bytes], place: Location) -> JsonLines:
    return JsonLines(file, place.name, place.setting)


def _lines(file: IO[bytes], place: Location) -> Iterator[Record]:
    return (record for _, record in json_lines(file, place.name, place.setting))


def _json(file: IO[bytes], place: Location) -> Records:
    """Read a list of objects, or one object per line, because JSON lines are sometimes named .json, too."""
    if not _is_list(file):
        return _json_lines(file, place)
    return kept(_listed(file, place), place.name, place.setting)


def _is_list(file: IO[bytes]) -> bool:
    file.seek(0)
    begins = file.read(256)
    file.seek(0)
    return begins.decode("utf-8-sig", "ignore").lstrip().startswith("[")


def _listed(file: IO[bytes], place: Location) -> Iterator[Record]:
    if not _is_list(file):
        yield from _lines(file, place)
        return
    try:
        records = parse_json(_whole(file, place).decode("utf-8-sig"), whole=True)
    except json.JSONDecodeError as error:
        raise DataError(f"{place.name}:{error.lineno} must be JSON, got {error.msg} at column {error.colno}") from None
    if not records:
        raise DataError(f"{place.setting}: {place.name} must hold at least one record, got none")
    for index, record in enumerate(records):
        where = f"record {index} (from 0) of {place.name}"
        check_keys(checked(record, where), records[0], where, "record 0")
        yield record


def _whole(file: IO[bytes], place: Location) -> bytes:
    content = file.read(LARGEST_LIST + 1)
    if len(content) > LARGEST_LIST:
        raise DataError(
            f"{place.name} must have at most {LARGEST_LIST} bytes, as it is one list; write one record a line"
        )
    return content


def _rows(file: IO[bytes], place: Location, delimiter: str) -> Iterator[Record]:
    """Read a header line and then records; every value is a text, so that an answer 007 does not become 7."""
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    reader = csv.reader(lines_of(text, place.name), strict=True, delimiter=delimiter)
    header: list[str] | None = None
    found = 0
    try:
        for row in reader:
            if not row:
                continue
            if header is None:
                header = row
                if wrong := sorted({name for name in row if not name.strip() or row.count(name) > 1}):
                    raise DataError(
                        f"{place.name}:1 must name every column once, got {wrong} in {row}; mend the header"
                    )
                continue
            found += 1
            if len(row) != len(header):
                where = f"{place.name}:{reader.line_num}"
                raise DataError(f"{where} must have a value for each of {header}, got {len(row)}: {row}")
            yield dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{place.name}:{reader.line_num} must be CSV, got: {error}; check its quotes") from None
    if not found:
        lines = 0 if header is None else 1
        raise DataError(f"{place.setting}: {place.name} must hold a header and at least one record, got {lines} lines")


def _kept_rows(file: IO[bytes], place: Location, delimiter: str) -> Records:
    return kept(_rows(file, place, delimiter), place.name, place.setting)


def _parquet(file: IO[bytes], place: Location) -> Records:
    """Write the rows into a temporary file in Arrow's format, which can be mapped into memory."""
    import pyarrow as pa  # a quarter of a second to import
    from pyarrow import parquet

    copy = tempfile.TemporaryFile(prefix="tpu_grpo_data_")  # noqa: SIM115  # lives as long as the records
    with _table_explained(place, "a Parquet file"):
        opened = parquet.ParquetFile(file)
        with pa.ipc.new_stream(copy, opened.schema_arrow) as writer:
            for batch in opened.iter_batches():
                writer.write_batch(batch)
    copy.flush()
    return _arrow(copy, place)


def _arrow(file: IO[bytes], place: Location) -> Records:
    """Map a file in Arrow's format for files (Feather) or for streams, as datasets writes it, into memory."""
    import pyarrow as pa

    with _table_explained(place, "an Arrow file"):
        mapped = pa.memory_map(f"/dev/fd/{file.fileno()}")  # the mapping keeps a deleted file alive
        opened = pa.ipc.open_file if mapped.read(6) == b"ARROW1" else pa.ipc.open_stream
        mapped.seek(0)
        table = opened(mapped).read_all()
    from tpu_grpo.data.arrow_rows import ArrowRows  # only needed here

    return ArrowRows(table, f"{place.setting}: {place.name}")


@contextmanager
def _table_explained(place: Location, kind: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{place.setting}: {place.name} must be {kind}, got {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Reader:
    """The functions that read files with one suffix."""

    all: Callable[[IO[bytes], Location], Records]
    """Checks all records of an open file, and returns a sequence that reads them later."""
    some: Callable[[IO[bytes], Location], Iterator[Record]]
    """Yields at least the first record."""
    whole: bool = False
    """Whether a file must be read as a whole to get its first record."""


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        ".jsonl": Reader(_json_lines, _lines),
        ".ndjson": Reader(_json_lines, _lines),
        ".json": Reader(_json, _listed, whole=True),
        ".parquet": Reader(_parquet, lambda file, place: iter(_parquet(file, place)), whole=True),
        ".arrow": Reader(_arrow, lambda file, place: iter(_arrow(file, place))),
        ".csv": Reader(partial(_kept_rows, delimiter=","), partial(_rows, delimiter=",")),
        ".tsv": Reader(partial(_kept_rows, delimiter="\t"), partial(_rows, delimiter="\t")),
    }
)
"""The reader for each suffix of a file."""


# --- files -----------------------------------------------------------------------------------------------------------


def read_files(paths: Iterable[str], setting: str) -> Records:
    """Check all records of some files, and return a sequence that reads them when they are indexed.

    The paths come from ``setting``; each may be a pattern or a URL, and may end with the suffix of a compressed file.

    Raises:
        DataError: for a file that is missing, empty or not readable, or an invalid line, with file and line.
        ConfigError: for a URL that needs a package which is not installed.
    """
    locations = [location for path in paths for location in expand(path, setting)]
    for location in locations:
        _reader(location)
    parts = [_read(location, lambda place: _reader(place).all(place.open(), place)) for location in locations]
    for location, part in zip(locations[1:], parts[1:], strict=True):
        check_keys(part[0], parts[0][0], f"the first record of {location.name}", f"{locations[0].name}")
    return parts[0] if len(parts) == 1 else Joined(parts)


def first_record(paths: Iterable[str], setting: str) -> Record | None:
    """Read the first record of some files, and check that all exist; None for URLs and for large files read as a whole.

    Raises:
        DataError, ConfigError: as in `read_files`, but only for errors that the first record shows.
    """
    locations = [location for path in paths for location in expand(path, setting)]
    for location in locations:
        _reader(location)
        if not location.is_remote:
            _read(location, lambda place: open_file(place.path).close())
    first = locations[0]
    whole = _reader(first).whole or first.packed
    if first.is_remote or (whole and first.path.stat().st_size > GLANCED_BYTES):
        return None
    return _read(first, lambda place: next(_reader(place).some(place.open(), place)))


def is_file_name(path: str) -> bool:
    """Whether a path ends with a suffix that has a reader."""
    return Location(path, "").suffix in READERS


def _reader(location: Location) -> Reader:
    if location.suffix in READERS:
        return READERS[location.suffix]
    raise DataError(
        f"{location.setting} must be a {', '.join(READERS)} file (also packed, as .jsonl.gz), {OTHER_KINDS}, got "
        f"{location.name}{_hint(location)}"
    )


def _read[Result](location: Location, action: Callable[[Location], Result]) -> Result:
    """Apply an action to a file; errors name the setting that the file comes from."""
    path, setting = location.name, location.setting
    try:
        return action(location)
    except FileNotFoundError:
        where = "" if location.is_remote else f" (relative to {Path.cwd()})"
        raise DataError(f"{setting}: data file not found: {path}{where}; correct it{_hint(location)}") from None
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno in NOT_OF_THE_FILE:
            raise
        raise DataError(f"{setting}: {path} must be readable UTF-8, got {type(error).__name__}: {error}") from error


def _hint(location: Location) -> str:
    """Return a hint at hf:NAME if a name that is no file looks like a dataset of the hub; otherwise an empty text."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", location.name) and location.suffix not in READERS:
        return f"; did you mean hf:{location.name}, a dataset of the Hugging Face hub?"
    return ""
