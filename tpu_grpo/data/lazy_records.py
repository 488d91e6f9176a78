"""Sequences of records on disk: a record is read when it is indexed, so that a file may be larger than the memory.

All records are checked when a file is opened, so that an error is raised at the start of a run, not in its middle.
"""

import json
import os
import tempfile
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import IO, Any, Literal

from tpu_grpo.hosts.ending import this_process
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.untrusted_input import lines_of, parse_json

Record = Mapping[str, Any]
Records = Sequence[Record]
ROWS = 1000
"""The number of lines of a file, or rows of a table, that are read together."""
MUCH = {"bytes": 20_000_000, "prompts": 20_000}
"""The smallest total for which a progress bar is shown, by unit."""


class Lazy(Sequence[Record]):
    """A sequence that reads each record when it is indexed."""

    @abstractmethod
    def at(self, index: int) -> Record:
        """Read one record by its index, which is valid."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.at(each) for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} records, got the index {index}")
        return self.at(index % len(self))


class JsonLines(Lazy):
    """The JSON objects of a file, one per line, all with the same keys; blank lines at the end do not count.

    The file is kept open. Errors show its ``name`` and the setting that names it.

    Raises:
        DataError: for an invalid line, with its number, or a file without a record.
    """

    def __init__(self, file: IO[bytes], name: str, setting: str):
        self._file = file
        self._name = name
        self._state = self._file_state()
        self._starts = array("q", [0])
        """The offsets in the file where records begin, and where the last record ends."""
        with reading(f"reading {name}", os.fstat(file.fileno()).st_size, "bytes") as advance:
            for line, _ in json_lines(file, name, setting):
                self._starts.append(self._starts[-1] + len(line))
                if not len(self) % ROWS:
                    advance(self._starts[-1])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def at(self, index: int) -> Record:
        """Read one line; raises DataError if the file has changed since it was opened."""
        (record,) = self._between(index, index + 1)
        return record

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), ROWS):
            yield from self._between(start, min(start + ROWS, len(self)))

    def _between(self, first: int, end: int) -> Iterator[Record]:
        """Read the records from ``first`` to before ``end``."""
        if self._file_state() != self._state:
            raise DataError(f"{self._name} was changed while it is read; a run needs it as it was: restore it")
        begin = self._starts[first]
        lines = os.pread(self._file.fileno(), self._starts[end] - begin, begin)
        for index in range(first, end):
            line = lines[self._starts[index] - begin : self._starts[index + 1] - begin]
            yield parse(line, self._name, first=index == 0)

    def _file_state(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns


def json_lines(file: IO[bytes], name: str, setting: str) -> Iterator[tuple[bytes, Record]]:
    """Yield each line of a file of JSON objects with its record; raises as `JsonLines` does, once it is there."""
    first: Record | None = None
    blank = 0
    for number, line in enumerate(lines_of(file, name), start=1):
        if not line.strip():
            blank = blank or number
        elif blank:
            raise DataError(f"{name}:{blank} must be a JSON object, got an empty line")
        else:
            record = parse(line, f"{name}:{number}", first=number == 1)
            first = first or record
            check_keys(record, first, f"{name}:{number}", "line 1")
            yield line, record
    if first is None:
        raise DataError(f"{setting}: {name} must hold at least one record, got none; write one JSON object a line")


def parse(line: bytes, where: str, *, first: bool = False) -> dict[str, Any]:
    """Read a line of JSON; the first line of a file may begin with a byte-order mark.

    Raises:
        DataError: for anything but an object with at least one key.
        UnicodeDecodeError: for a line that is not UTF-8.
    """
    text = line.decode("utf-8-sig" if first else "utf-8")
    try:
        record = parse_json(text, whole=True)
    except json.JSONDecodeError as error:
        what = "an empty line" if not text.strip() else f"{error.msg} at column {error.colno}"
        raise DataError(f"{where} must be a JSON object, got {what}") from None
    return checked(record, where)


def checked(record: Any, where: str) -> dict[str, Any]:
    """Check that a JSON value is an object with at least one key; raises DataError if it is not."""
    if not isinstance(record, dict) or not record:
        got = "an empty one" if record == {} else f"a {type(record).__name__}"
        raise DataError(f"{where} must be a JSON object with a key per column, got {got}")
    return record


def kept(records: Iterable[Record], name: str, setting: str) -> JsonLines:
    """Write records to a temporary JSON-lines file, deleted when the process ends, and return the file's records."""
    file = tempfile.TemporaryFile(prefix="tpu_grpo_data_")  # noqa: SIM115  # lives as long as the records
    for record in records:
        file.write(json.dumps(record).encode() + b"\n")
    file.flush()
    file.seek(0)
    return JsonLines(file, name, setting)


class Mapped(Lazy):
    """The records of another sequence, each changed by ``change(record, index)`` when it is read."""

    def __init__(self, records: Records, change: Callable[[Record, int], Record]):
        self._records = records
        self._change = change

    def __len__(self) -> int:
        return len(self._records)

    def at(self, index: int) -> Record:
        """Read one record, and change it."""
        return self._change(self._records[index], index)

    def __iter__(self) -> Iterator[Record]:
        return (self._change(record, index) for index, record in enumerate(self._records))


class Joined(Lazy):
    """Several sequences, one after the other."""

    def __init__(self, parts: Sequence[Records]):
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def at(self, index: int) -> Record:
        """Read one record from the part that contains it."""
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[Record]:
        for part in self._parts:
            yield from part


def check_keys(record: Mapping[str, Any], first: Mapping[str, Any], where: str, first_is: str) -> None:
    """Raise DataError, naming missing and additional keys, if a record does not have the keys of ``first``.

    ``where`` and ``first_is`` are the names of the two records in the error.
    """
    if record.keys() == first.keys():
        return
    lacking, extra = sorted(first.keys() - record.keys()), sorted(record.keys() - first.keys())
    found = " and ".join(part for part in (f"lacks {lacking}" * bool(lacking), f"adds {extra}" * bool(extra)) if part)
    raise DataError(
        f"{where} must have the keys of {first_is}, {list(first)}, but {found}; write null where there is none"
    )


@contextmanager
def reading(what: str, total: int, unit: Literal["bytes", "prompts"]) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the progress so far, out of ``total``; host 0 shows a bar if the total is large.

    The bar is one line, which is removed at the end. It is shown only on a terminal.
    """
    if total < MUCH[unit] or this_process.index != 0:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
