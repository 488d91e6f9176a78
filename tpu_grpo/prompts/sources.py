"""What the config says about a source leads to its records, whatever kind of source it is.

builtin:addition                  the built-in task
reasoning_gym:TASK                problems that reasoning-gym makes
hf:NAME, or a directory           a Hugging Face dataset, of the hub or on disk
path.py:function, module:function what a function of the user's own returns
anything else                     a file: .jsonl, .parquet, .csv

All end as a list of mappings with the same keys, the columns; ``columns`` of the config then renames them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tpu_grpo.config import BUILTIN, BUILTIN_TASK, GYM, HUB, ReadingSection
from tpu_grpo.errors import ConfigError, DataError
from tpu_grpo.prompts.files import READERS, read_file
from tpu_grpo.prompts.functions import call_function, make_puzzles
from tpu_grpo.prompts.hub import read_dataset
from tpu_grpo.tasks import addition

PLAIN = ReadingSection()
"""A source is read so by default."""


@dataclass(frozen=True)
class Source:
    """A Source is one source of records, with the setting that names it."""

    path: str
    reading: ReadingSection = PLAIN
    use: Literal["train", "heldout"] = "train"
    setting: str = "data.path"

    @property
    def section(self) -> str:
        """Return the section of the config around ``path``: data, evaluation, data.sources.0."""
        return self.setting.rpartition(".")[0]


def read_records(source: Source) -> list[dict[str, Any]]:
    """Read all records of a source, all with the same columns, under the names that the config gives them.

    Raises:
        DataError: for data that is missing, empty or malformed; names file and line where there is one.
        ConfigError: for a setting that this kind of source does not have, or a column that is not there.
    """
    _check_settings(source)
    records = _read(source)
    return renamed(records, source.reading.columns, source) if source.reading.columns else records


def _read(source: Source) -> list[dict[str, Any]]:
    path, reading, setting = source.path, source.reading, source.setting
    if path.startswith(BUILTIN):
        if path != BUILTIN_TASK:
            raise DataError(f"{setting}: the only built-in data is {BUILTIN_TASK}, got {path!r}")
        return _addition(source.use)
    if path.startswith(GYM):
        return make_puzzles(path.removeprefix(GYM), reading.options, setting, heldout=source.use == "heldout")
    file = Path(path).expanduser()
    if path.startswith(HUB) or (file.is_dir() and file.suffix not in READERS):
        split = reading.split or ("train" if source.use == "train" else "test")
        return read_dataset(path, split, reading, setting)
    if ":" in path and not file.exists():
        return call_function(path, reading.options, setting)
    return read_file(file, setting)


def _check_settings(source: Source) -> None:
    """Refuse settings that would be ignored."""
    hub = source.path.startswith(HUB) or Path(source.path).expanduser().is_dir()
    function = ":" in source.path and not source.path.startswith((HUB, BUILTIN))
    for name, used in (("split", hub), ("subset", hub), ("options", hub or function)):
        if (value := getattr(source.reading, name)) and not used:
            raise ConfigError(
                f"{source.section}.{name} is for Hugging Face datasets{' and functions' * (name == 'options')}, got "
                f"{value!r} with {source.setting}={source.path}; leave it out"
            )


def renamed(records: Sequence[Mapping[str, Any]], columns: Mapping[str, str], source: Source) -> list[dict[str, Any]]:
    """Rename columns, which then come first; those that are not mentioned keep their names.

    With {answer: solution} the records {solution: 4, level: 1} become {answer: 4, level: 1}. A column that had the name
    before makes way. A dot reaches into a column, unless there is one of the whole name.

    Raises:
        ConfigError: for a column that is not there.
    """
    out = []
    for index, record in enumerate(records):
        new = {
            name: _value(record, column, f"record {index} of {source.path}", source) for name, column in columns.items()
        }
        out.append(new | {k: v for k, v in record.items() if k not in new and k not in columns.values()})
    return out


def _value(record: Mapping[str, Any], column: str, where: str, source: Source) -> Any:
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(
                f"{source.section}.columns names the column {column!r}, which {where} (from 0) lacks; available: "
                f"{', '.join(record)}"
            )
        value = value[part]
    return value


def _addition(use: Literal["train", "heldout"]) -> list[dict[str, Any]]:
    """Return the task's problems; held-out ones come in a fixed shuffled order.

    They come sorted by their first number, and small numbers carry less often: of the first half in that order 60 %
    need a carry, of all 73 %. An evaluation that takes the first few would measure an easier task.
    """
    records: list[dict[str, Any]] = [dict(problem) for problem in addition.problems(use)]
    if use == "heldout":
        random.Random(0).shuffle(records)  # 0: the same for every run
    return records
