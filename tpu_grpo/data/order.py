"""The seed alone decides the order of a source's prompts: which index stands at any position, epoch after epoch.

A column with the values [2, 1, 1] sorts two epochs like this; each epoch has its own order of equal values:

    position  0 1 2   3 4 5
    index     2 1 0   1 2 0
"""

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_grpo.records.errors import DataError

if TYPE_CHECKING:
    import grain


def shuffled(count: int, seed: int, shuffle: bool) -> "grain.MapDataset[int]":
    """Return all indices below ``count`` once an epoch, each epoch shuffled differently, or in order."""
    import grain  # imports jax, which checking and showing a config do without

    order = grain.MapDataset.source(range(count))
    # grain hashes the seed before it adds the epoch: runs with neighbouring seeds have no epoch in common.
    return (order.seed(seed).shuffle() if shuffle else order).repeat()


def sorted_by(
    values: Iterable[tuple[Any, Mapping[str, Any]]], column: str, seed: int, shuffle: bool
) -> "grain.MapDataset[int]":
    """Return all indices once an epoch, by a column's values, smallest first; equal values are shuffled or in order.

    Args:
        values: the column's value of each prompt, None where it has none, and all its columns.
        column: what errors call it.
        seed: decides the order of equal values.
        shuffle: whether equal values are shuffled.

    Raises:
        DataError: for values that are missing or cannot be compared.
    """
    import grain

    return grain.MapDataset.source(_Sorted(_ranks(values, column), seed, shuffle))


class _Sorted:
    """This endless sequence of indices is a source as grain takes it."""

    def __init__(self, ranks: np.ndarray, seed: int, shuffle: bool):
        self._ranks = ranks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, len(self._ranks))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._order(epoch)
        return int(self._epoch[1][place])

    def _order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.argsort(self._ranks, kind="stable")
        draw = np.random.default_rng([self._seed, epoch]).permutation(len(self._ranks))
        return np.lexsort((draw, self._ranks))  # the last key counts most


def _ranks(found: Iterable[tuple[Any, Mapping[str, Any]]], column: str) -> np.ndarray:
    """Rank the values: [0.5, 0.1, 0.5] -> [1, 0, 1]. Texts that are all numbers, as from CSV, count as numbers."""
    values: list[Any] = []
    for index, (value, columns) in enumerate(found):
        if value is None:
            raise DataError(
                f"data.curriculum={column} must be a column with a value in every record, prompt {index} (from 0) has "
                f"{dict(columns)!r:.200}; fill it, or name another column"
            )
        values.append(value)
    if all(isinstance(value, str) for value in values):
        values = _numbers(values)
    try:
        order = {value: rank for rank, value in enumerate(sorted(set(values)))}
    except TypeError as error:
        raise DataError(
            f"data.curriculum={column} must hold values that can be sorted, numbers or texts, got {error}; make them "
            "of one kind"
        ) from error
    return np.array([order[value] for value in values])


def _numbers(texts: list[str]) -> list[Any]:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return list(texts)
