"""The formats of files: how records are read from an open file of each, all of them or the first."""

import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from tpu_grpo.data.checks import check_keys
from tpu_grpo.data.locations import Location
from tpu_grpo.data.records import ArrowRows, JsonLines, Record, Records, checked, kept, parse
from tpu_grpo.records.errors import DataError

if TYPE_CHECKING:
    from pyarrow import parquet


def _json_lines(file: IO[bytes], place: Location) -> JsonLines:
    return JsonLines(file, place.name, place.setting)


def _first_line(file: IO[bytes], place: Location) -> Iterator[Record]:
    line = file.readline()
    if not line.strip() and not file.read().strip():
        raise _nothing(place, "; write one JSON object a line")
    yield parse(line, f"{place.name}:1", first=True)


def _json(file: IO[bytes], place: Location) -> Records:
    """Read a list of objects, or objects one a line, which some call .json too."""
    if not file.read(256).decode("utf-8-sig", "ignore").lstrip().startswith("["):
        file.seek(0)
        return _json_lines(file, place)
    return kept(_listed(file, place), place.name, place.setting)


def _listed(file: IO[bytes], place: Location) -> Iterator[Record]:
    file.seek(0)
    if not file.read(256).decode("utf-8-sig", "ignore").lstrip().startswith("["):
        file.seek(0)
        yield from _first_line(file, place)
        return
    file.seek(0)
    try:
        records = json.loads(file.read().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{place.name}:{error.lineno} must be JSON, got {error.msg} at column {error.colno}") from None
    if not records:
        raise _nothing(place)
    for index, record in enumerate(records):
        where = f"record {index} (from 0) of {place.name}"
        check_keys(checked(record, where), records[0], where, "record 0")
        yield record


def _rows(file: IO[bytes], place: Location, delimiter: str) -> Iterator[Record]:
    """Read a header line and then records; every value is a text, so that an answer 007 stays one."""
    reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True, delimiter=delimiter)
    header: list[str] | None = None
    found = 0
    try:
        for row in reader:
            if not row:
                continue
            if header is None:
                header = row
                _check_header(header, place)
            else:
                found += 1
                yield _row(header, row, f"{place.name}:{reader.line_num}")
    except csv.Error as error:
        raise DataError(f"{place.name}:{reader.line_num} must be CSV, got: {error}; check its quotes") from None
    if not found:
        lines = 0 if header is None else 1
        raise DataError(f"{place.setting}: {place.name} must hold a header and at least one record, got {lines} lines")


def _check_header(header: list[str], place: Location) -> None:
    if wrong := sorted({name for name in header if not name.strip() or header.count(name) > 1}):
        raise DataError(f"{place.name}:1 must name every column once, got {wrong} in {header}; mend the header")


def _row(header: list[str], row: list[str], where: str) -> Record:
    if len(row) != len(header):
        raise DataError(f"{where} must have a value for each of {header}, got {len(row)}: {row}")
    return dict(zip(header, row, strict=True))


def _kept_rows(file: IO[bytes], place: Location, delimiter: str) -> Records:
    return kept(_rows(file, place, delimiter), place.name, place.setting)


def _parquet(file: IO[bytes], place: Location) -> Records:
    """Write the rows as Arrow has them into a temporary file, which can be mapped into memory."""
    import pyarrow as pa  # a quarter of a second to import

    copy = tempfile.NamedTemporaryFile(prefix="tpu_grpo_data_")  # noqa: SIM115  # lives as long as the records
    with _parquet_explained(place):
        opened = _opened_parquet(file)
        with pa.OSFile(copy.name, "wb") as sink, pa.ipc.new_file(sink, opened.schema_arrow) as writer:
            for batch in opened.iter_batches():
                writer.write_batch(batch)
    table = pa.ipc.open_file(pa.memory_map(copy.name)).read_all()  # the mapping holds the file when its name is gone
    if not table.num_rows:
        raise _nothing(place)
    return ArrowRows(table)


def _first_row(file: IO[bytes], place: Location) -> Iterator[Record]:
    with _parquet_explained(place):
        batch = next(iter(_opened_parquet(file).iter_batches(batch_size=1)), None)
    if batch is None or not batch.num_rows:
        raise _nothing(place)
    yield from batch.to_pylist()


def _opened_parquet(file: IO[bytes]) -> "parquet.ParquetFile":
    from pyarrow import parquet

    return parquet.ParquetFile(file)


@contextmanager
def _parquet_explained(place: Location) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"{place.setting}: {place.name} must be a Parquet file, got {type(error).__name__}: {error}"
        ) from error


def _nothing(place: Location, remedy: str = "") -> DataError:
    return DataError(f"{place.setting}: {place.name} must hold at least one record, got none{remedy}")


@dataclass(frozen=True)
class Reader:
    """A Reader reads the files of one suffix."""

    all: Callable[[IO[bytes], Location], Records]
    """Checks all records of an open file, and returns them to be read later."""
    some: Callable[[IO[bytes], Location], Iterator[Record]]
    """Yields the first record, at least."""
    whole: bool = False
    """Whether the first record cannot be had without the others."""


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        ".jsonl": Reader(_json_lines, _first_line),
        ".ndjson": Reader(_json_lines, _first_line),
        ".json": Reader(_json, _listed, whole=True),
        ".parquet": Reader(_parquet, _first_row),
        ".csv": Reader(partial(_kept_rows, delimiter=","), partial(_rows, delimiter=",")),
        ".tsv": Reader(partial(_kept_rows, delimiter="\t"), partial(_rows, delimiter="\t")),
    }
)
"""The suffix of a file decides which of these reads it."""
