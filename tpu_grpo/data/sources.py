"""Reads the records of a source of any kind, by its name in the config:

    builtin:addition                   a built-in task
    builtin:environment                empty prompts, for environments that write the first message
    reasoning_gym:TASK                 problems that reasoning-gym makes
    hf:NAME, or a directory            a Hugging Face dataset, of the hub or on disk
    path.py:function, module:function  the records that a user's function returns
    anything else                      files, see record_files.py: a path, a pattern, a URL, or a list of these

Every kind gives a sequence of mappings with the same keys (columns). The config's setting ``columns`` can rename keys.
"""

import inspect
import os
import random
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal

from tpu_grpo.config import BUILTIN, GYM, HUB, NO_DATA, ReadingSection
from tpu_grpo.config.plugins import did_you_mean, find_function, need, source_file
from tpu_grpo.data.lazy_records import Mapped, Record, Records, check_keys
from tpu_grpo.data.record_files import first_record, is_address, is_file_name, read_files
from tpu_grpo.models.tasks import TASKS
from tpu_grpo.records.errors import ConfigError, DataError

OWN_TASKS = 10_000
"""The number of records of builtin:environment, whose column ``task`` counts from 0; that of held-out records counts
from this number."""
OLDEST_DATASETS = 4
"""The oldest major release of the library datasets that can be imported with the pinned pyarrow."""
PLAIN = ReadingSection()
"""The default settings for reading a source."""


@dataclass(frozen=True)
class Source:
    """A source of records, with the setting that names it."""

    given: str | tuple[str, ...]
    """A path, or the paths of several files."""
    reading: ReadingSection = PLAIN
    use: Literal["train", "heldout"] = "train"
    setting: str = "data.path"

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the path, or the paths of several files, as a tuple."""
        return (self.given,) if isinstance(self.given, str) else self.given

    @property
    def path(self) -> str:
        """Return the path, or the first of several."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """Return the paths as one text, for messages."""
        return ", ".join(self.paths)

    @property
    def section(self) -> str:
        """Return the section of the config that has the source's path, such as data, evaluation or data.sources.0."""
        return self.setting.rpartition(".")[0]


def read_records(source: Source) -> Records:
    """Check all records of a source, and return them with their columns renamed as the config says.

    All records have the same columns. Records on disk are read when they are indexed.

    Raises:
        DataError: for data that is missing, empty or malformed, with file and line if it is in a file.
        ConfigError: for a setting that this kind of source does not have, or a missing column.
    """
    path, reading, setting = source.path, source.reading, source.setting
    records: Records
    match _kind(source):
        case "builtin":
            records = _builtin(source)
        case "puzzles":
            records = make_puzzles(path.removeprefix(GYM), reading.options, setting, heldout=source.use == "heldout")
        case "dataset":
            split = reading.split or ("train" if source.use == "train" else "test")
            records = read_dataset(path, split, reading, setting)
        case "function":
            records = call_function(path, reading.options, setting)
        case "files":
            records = read_files(source.paths, setting)
    return renamed(records, source)


def glance(source: Source) -> Record | None:
    """Read the first record of a source, with its columns renamed as the config says, if that is quick.

    Returns None for functions, reasoning-gym, datasets, and files slow to read. Missing files raise DataError.
    """
    if (kind := _kind(source)) == "files":
        record = first_record(source.paths, source.setting)
    elif kind == "builtin":
        record = _builtin(source)[0]
    else:
        if kind == "function" and (file := source_file(source.path)) is not None and not file.is_file():
            raise DataError(f"{source.setting}: data file not found: {file} (relative to {Path.cwd()}); correct it")
        return None
    return None if record is None else renamed([record], source)[0]


def _kind(source: Source) -> Literal["builtin", "puzzles", "dataset", "function", "files"]:
    """Return a source's kind; refuse settings that would be ignored, and lists in which a path does not name files."""
    path, file = source.path, Path(source.path).expanduser()
    if len(source.paths) > 1 and (others := [path for path in source.paths if path.startswith((HUB, BUILTIN, GYM))]):
        raise ConfigError(f"{source.setting} must list files only, got {others}; mix them with data.sources")
    if len(source.paths) > 1 or is_address(path):
        kind = "files"
    elif path.startswith(BUILTIN):
        kind = "builtin"
    elif path.startswith(GYM):
        kind = "puzzles"
    elif path.startswith(HUB) or (file.is_dir() and not is_file_name(path)):
        kind = "dataset"
    else:
        kind = "function" if ":" in path and not file.exists() else "files"
    hub, function = kind == "dataset", kind in ("function", "puzzles")
    for name, used in (("split", hub), ("subset", hub), ("options", hub or function)):
        if (value := getattr(source.reading, name)) and not used:
            raise ConfigError(
                f"{source.section}.{name} is for Hugging Face datasets{' and functions' * (name == 'options')}, got "
                f"{value!r} with {source.setting}={source.name}; leave it out"
            )
    return kind


def renamed(records: Records, source: Source) -> Records:
    """Rename columns as the source's setting ``columns`` says, and put these first; other columns keep their names.

    With {answer: solution} the records {solution: 4, level: 1} become {answer: 4, level: 1}. A column that already has
    a new name is dropped. The old name a.b means the key b in the mapping of column a, if there is no column a.b.

    Raises:
        ConfigError: for a missing column; for records after the first, only when they are read.
    """
    if not (columns := source.reading.columns):
        return records

    def change(record: Record, index: int) -> Record:
        where = f"record {index} of {source.name}"
        new = {name: _value(record, column, where, source) for name, column in columns.items()}
        return new | {k: v for k, v in record.items() if k not in new and k not in columns.values()}

    change(records[0], 0)
    return Mapped(records, change)


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


def _builtin(source: Source) -> Records:
    """Return a task's problems; held-out problems come in a fixed shuffled order.

    The addition task sorts problems by first number, and small numbers need a carry less often: in 60 % of the first
    half, in 73 % of all. Without the shuffle, an evaluation of the first few problems would measure an easier task.
    """
    if source.path == NO_DATA:
        first = 0 if source.use == "train" else OWN_TASKS
        return [{"prompt": "", "task": first + number} for number in range(OWN_TASKS)]
    name = source.path.removeprefix(BUILTIN)
    if name not in TASKS:
        known = ", ".join([*(BUILTIN + task for task in TASKS), NO_DATA])
        raise DataError(f"{source.setting} must name built-in data, got {source.path!r}; there are {known}")
    records: list[dict[str, Any]] = [dict(problem) for problem in TASKS[name].problems(source.use)]
    if source.use == "heldout":
        random.Random(0).shuffle(records)  # 0: the same for every run
    return records


# --- records from functions and reasoning-gym -------------------------------------------------------------------------


def call_function(name: str, options: Mapping[str, Any], setting: str) -> Records:
    """Call ``path.py:function`` or ``module:function`` with the options, and return its records.

    The function must return the same records at every call and on every host: hosts compare them.

    Raises:
        DataError: for a function that is missing, raises, or returns anything but mappings with the same keys.
        ConfigError: for options that the function does not take.
    """
    function = find_function(name, "data", DataError)
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"{setting}={name} must take the options {dict(options)}, but {error}; its signature is "
            f"{inspect.signature(function)}"
        ) from None
    try:
        records = function(**options)
        if (type(records).__module__, type(records).__name__) == ("datasets.arrow_dataset", "Dataset"):
            from tpu_grpo.data.arrow_rows import ArrowRows  # only needed here

            return ArrowRows(records.with_format("arrow")[:], f"{setting}={name}")
        records = list(records) if isinstance(records, Iterable) else records
    except Exception as error:  # user code may raise anything
        raise DataError(f"{setting}={name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(records, list) or not records:
        got = "none" if records == [] else f"a {type(records).__name__}"
        raise DataError(f"{setting}={name} must return at least one record, a mapping of columns each, got {got}")
    for index, record in enumerate(records):
        where = f"record {index} (from 0) of {name}"
        if not isinstance(record, Mapping) or not record:
            raise DataError(f"{where} must be a mapping of columns, got {record!r}")
        check_keys(record, records[0], where, "record 0")
    return [dict(record) for record in records]


def make_puzzles(task: str, options: Mapping[str, Any], setting: str, *, heldout: bool) -> list[dict[str, Any]]:
    """Make the problems of a reasoning-gym task, with the columns question, answer and metadata.

    ``options`` are the task's, such as size and seed. The default seed is 0 for training and 1 for evaluation.

    Raises:
        ConfigError: for an unknown task, or options that the task does not take.
    """
    need("reasoning_gym", f"{setting}={GYM}{task}", ConfigError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from a package that reasoning-gym imports
        from reasoning_gym import create_dataset  # seconds to import
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        hint = did_you_mean(task, DATASETS).rstrip() or f"there are {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"{setting} must name a task of reasoning-gym, got {task!r}; {hint}")
    try:
        dataset = create_dataset(task, **{"seed": int(heldout), **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{setting}: reasoning-gym's {task} does not take the options {dict(options)}: {error}"
        ) from error
    return [dict(dataset[index]) for index in range(len(dataset))]


# --- Hugging Face datasets -------------------------------------------------------------------------------------------


def read_dataset(path: str, split: str, reading: ReadingSection, setting: str) -> Records:
    """Open all records of one split; each is read from disk when it is indexed.

    ``path`` is hf:NAME, a directory that ``save_to_disk`` wrote (of one dataset without splits, or of several by
    split), or a directory of data files for ``load_dataset``. A dataset of the hub is downloaded on first use. With the
    environment variable HF_HUB_OFFLINE=1, it must be in the local cache.

    Raises:
        DataError: for a dataset, subset or split that does not exist.
        ConfigError: for settings that this kind of directory does not have.
    """
    if int((installed := metadata.version("datasets")).split(".")[0]) < OLDEST_DATASETS:
        raise ConfigError(
            f"datasets must be {OLDEST_DATASETS}.0 or later, got {installed}; install what pyproject.toml pins"
        )
    datasets: Any = import_module("datasets")  # two seconds to import

    directory = None if path.startswith(HUB) else Path(path).expanduser()
    saved = directory is not None and any((directory / n).is_file() for n in ("state.json", "dataset_dict.json"))
    if saved:
        section = setting.rpartition(".")[0]
        for name in ("subset", "options"):
            if value := getattr(reading, name):
                raise ConfigError(
                    f"{section}.{name} means nothing for a directory of save_to_disk, got {value!r}; drop it"
                )
    datasets.disable_progress_bars()
    try:
        if saved:
            found = _load_saved(datasets, directory, split, reading)
        elif directory is None or not (found := _plain_files(datasets, directory, split, reading)):
            name = path.removeprefix(HUB) if directory is None else str(directory)
            found = datasets.load_dataset(name, reading.subset, split=split, **reading.options)
    except Exception as error:  # the library raises anything for what others wrote: files, or the hub's answers
        subset = f" and the subset {reading.subset!r}" if reading.subset else ""
        offline = directory is None and os.environ.get("HF_HUB_OFFLINE") == "1"
        raise DataError(
            f"{setting}={path} must be a Hugging Face dataset with the split {split!r}{subset}, got "
            f"{type(error).__name__}: {error}"
            + "; HF_HUB_OFFLINE=1 is set, so that the hub is not asked: unset it, or load the dataset once without it"
            * offline
        ) from error
    if isinstance(found, list):
        return read_files(found, setting)
    from tpu_grpo.data.arrow_rows import ArrowRows  # only needed here

    return ArrowRows(found.with_format("arrow")[:], f"{setting}={path}: the split {split!r}")  # decodes no images


def _plain_files(datasets: Any, directory: Path, split: str, reading: ReadingSection) -> list[str]:
    """Return the files of a directory's split if they can be read as files, because datasets would read texts such as
    2024-01-05 and 007 as times and numbers; empty for files of other kinds, and with settings on how they are read."""
    config = datasets.load_dataset_builder(str(directory), reading.subset, **reading.options).config
    files = list(map(str, (config.data_files or {}).get(split, ())))
    given = ["name", "version", "description", "data_dir", "data_files", *["sep"] * all(".tsv" in f for f in files)]
    is_plain = config == type(config)(**{key: getattr(config, key) for key in given if hasattr(config, key)})
    return files if is_plain and all(map(is_file_name, files)) else []


def _load_saved(datasets: Any, directory: Path | None, split: str, reading: ReadingSection) -> Any:
    found = datasets.load_from_disk(str(directory))
    if isinstance(found, datasets.Dataset):
        if reading.split not in (None, str(found.split)):
            raise ValueError(f"it was saved as the split {str(found.split)!r}; leave the split out")
        return found
    if split not in found:
        raise ValueError(f"unknown split {split!r}; there are {list(found)}")
    return found[split]
