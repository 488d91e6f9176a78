"""Hugging Face datasets come from the hub, from disk or from data files; only this file imports the library."""

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tpu_grpo.config import HUB, ReadingSection
from tpu_grpo.data.records import ROWS, Lazy, Record, Records
from tpu_grpo.records.errors import ConfigError, DataError

OLDEST = 4
"""This is the oldest major release of the library that imports beside the pyarrow that is pinned."""


def read_dataset(path: str, split: str, reading: ReadingSection, setting: str) -> Records:
    """Open all records of one split; each is read from disk when it is asked for.

    ``path`` is hf:NAME, a directory that ``save_to_disk`` wrote (of a dataset, which has no splits, or of several by
    split), or a directory of data files as ``load_dataset`` takes it. A dataset of the hub is downloaded
    on first use; with HF_HUB_OFFLINE=1 in the environment it comes from the local cache only.

    Raises:
        DataError: for a dataset, subset or split that is not there.
        ConfigError: for settings that this kind of directory does not have.
    """
    datasets = _library()
    directory = None if path.startswith(HUB) else Path(path).expanduser()
    saved = directory is not None and _saved(directory)
    if saved:
        _check_settings(reading, setting.rpartition(".")[0])
    datasets.disable_progress_bars()
    try:
        if saved:
            found = _load_saved(datasets, directory, split, reading)
        else:
            name = path.removeprefix(HUB) if directory is None else str(directory)
            found = datasets.load_dataset(name, reading.subset, split=split, **reading.options)
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{setting}={path} must be a Hugging Face dataset with the split {split!r}{_subset(reading)}, got "
            f"{type(error).__name__}: {error}{_offline(directory)}"
        ) from error
    if not len(found):
        raise DataError(f"{setting}={path}: the split {split!r} must hold at least one record, got none")
    return _Rows(found)


class _Rows(Lazy):
    """The rows of a dataset as Python has them; what it would decode, such as an image, stays as it is stored."""

    def __init__(self, dataset: Any):
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def at(self, index: int) -> Record:
        """Read one row."""
        return self._dataset[index : index + 1].to_pylist()[0]

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), ROWS):
            yield from self._dataset[start : start + ROWS].to_pylist()


def _library() -> Any:
    if int((found := metadata.version("datasets")).split(".")[0]) < OLDEST:
        raise ConfigError(f"datasets must be {OLDEST}.0 or later, got {found}; install what pyproject.toml pins")
    import datasets  # two seconds to import

    return datasets


def _saved(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _check_settings(reading: ReadingSection, section: str) -> None:
    for name in ("subset", "options"):
        if value := getattr(reading, name):
            raise ConfigError(f"{section}.{name} means nothing for a directory of save_to_disk, got {value!r}; drop it")


def _load_saved(datasets: Any, directory: Path | None, split: str, reading: ReadingSection) -> Any:
    found = datasets.load_from_disk(str(directory))
    if isinstance(found, datasets.Dataset):
        if reading.split not in (None, str(found.split)):
            raise ValueError(f"it was saved as the split {str(found.split)!r}; leave the split out")
        return found
    if split not in found:
        raise ValueError(f"unknown split {split!r}; there are {list(found)}")
    return found[split]


def _subset(reading: ReadingSection) -> str:
    return f" and the subset {reading.subset!r}" if reading.subset else ""


def _offline(directory: Path | None) -> str:
    if directory is None and os.environ.get("HF_HUB_OFFLINE") == "1":
        return "; HF_HUB_OFFLINE=1 is set, so that the hub is not asked: unset it, or load the dataset once without it"
    return ""
