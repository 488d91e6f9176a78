"""Some records are made, by a function of the user's own or by reasoning-gym."""

import difflib
import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from tpu_grpo.config.plugins import find_function
from tpu_grpo.data.checks import check_keys
from tpu_grpo.records.errors import ConfigError, DataError


def call_function(name: str, options: Mapping[str, Any], setting: str) -> list[dict[str, Any]]:
    """Return the records that ``path.py:function`` or ``module:function`` returns, called with the options.

    It must return the same records whenever and on whichever host it is called: hosts compare them.

    Raises:
        DataError: for a function that is not there, raises, or returns anything but mappings with the same keys.
        ConfigError: for options that it does not take.
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
        records = list(records) if isinstance(records, Iterable) else records
    except Exception as error:  # user code: anything can come
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

    ``options`` are its own, size and seed among them. The seed is 0 for training and 1 for an evaluation unless given.

    Raises:
        ConfigError: for a task that is not there, or options that it does not take.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package it imports
        from reasoning_gym import create_dataset  # seconds to import
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.5)
        raise ConfigError(
            f"{setting} must name a task of reasoning-gym, got {task!r}; "
            + (f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(DATASETS))}")
        )
    try:
        dataset = create_dataset(task, **{"seed": int(heldout), **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{setting}: reasoning-gym's {task} does not take the options {dict(options)}: {error}"
        ) from error
    return [dict(dataset[index]) for index in range(len(dataset))]
