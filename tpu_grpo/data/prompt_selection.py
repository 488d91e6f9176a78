"""Which prompts come more rarely (data.pools), which never again (data.retire), and in which order (data.curriculum).

Pools and retirement go by what steps have found out about each prompt: its latest pass rate (NaN before the first), and
how often in a row it was passed. A prompt's weight is the probability that it is sampled when the draw reaches it:

    pools.edges [0.25, 0.75], pools.weights [0.2, 1, 0.5], retire.times 2

    pass rate    NaN    0.25    0.5    0.9    0.9
    passes       0      0       0      1      2
    weight       1      0.2     1      0.5    0

Suffix: N prompts.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import DataSection
from tpu_grpo.records.errors import DataError

if TYPE_CHECKING:
    import grain


@dataclass(frozen=True)
class Selection:
    """What pools and retirement make of the prompts' latest pass rates, and of their numbers of passes in a row."""

    data: DataSection
    rates_N: Float[np.ndarray, " N"]
    passes_N: Float[np.ndarray, " N"]

    @property
    def weights(self) -> Float[np.ndarray, " N"]:
        """Return the probability with which each prompt is sampled when the draw reaches it."""
        pools = np.array(self.data.pools.weights or [1.0])
        return np.where(self._retired, 0.0, np.where(np.isnan(self.rates_N), 1.0, pools[self._pools]))

    @property
    def exhausted(self) -> str | None:
        """Why no prompt is left, and what to do; None if a prompt is left."""
        if self.weights.any():
            return None
        retired, size = int(self._retired.sum()), len(self.rates_N)
        return (
            f"{retired} of {size} prompts are retired (data.retire) and {size - retired} are in pools of weight 0 "
            "(data.pools); add harder prompts, or raise data.retire.at or these weights"
        )

    def metrics(self, passed_over: int) -> dict[str, float]:
        """Return the metrics after a step that passed over so many prompts; empty without pools and retirement."""
        pools, seen = len(self.data.pools.weights), ~np.isnan(self.rates_N)
        if not pools and self.data.retire.at is None:
            return {}
        return {
            "prompts/unseen_fraction": float((~seen).mean()),
            **{
                f"prompts/pool_{number + 1}_fraction": float((seen & ~self._retired & (self._pools == number)).mean())
                for number in range(pools)
            },
            "prompts/retired": int(self._retired.sum()),
            "prompts/skipped": passed_over,
        }

    @property
    def _pools(self) -> np.ndarray:
        """The index of each prompt's pool; a pass rate equal to an edge belongs to the lower pool."""
        return np.searchsorted(np.array(self.data.pools.edges), self.rates_N, side="left")

    @property
    def _retired(self) -> Bool[np.ndarray, " N"]:
        return self.passes_N >= self.data.retire.times


def sorted_epochs(
    found: Iterable[tuple[Any, Mapping[str, Any]]], column: str, seed: int, shuffle: bool
) -> "grain.MapDataset[int]":
    """Return an endless sequence of epochs, each of all indices sorted by a column's values, smallest first.

    For a column with the values [2, 1, 1], two epochs could be as follows, with equal values shuffled in each:

        position  0 1 2   3 4 5
        index     2 1 0   1 2 0

    ``found`` has a pair for each prompt: its value in the column (None if it lacks the column), and all its columns.
    Equal values are shuffled by ``seed`` if ``shuffle`` is set; otherwise they stay in order.

    Raises:
        DataError: for values that are missing or cannot be compared.
    """
    import grain  # imports jax, which checking and showing a config do without

    ranks = _ranks(found, column)

    @functools.lru_cache(maxsize=1)
    def order(epoch: int) -> np.ndarray:
        if not shuffle:
            return np.argsort(ranks, kind="stable")
        draw = np.random.default_rng([seed, epoch]).permutation(len(ranks))
        return np.lexsort((draw, ranks))  # lexsort's last key is the primary one

    def index(position: int) -> int:
        epoch, place = divmod(position, len(ranks))
        return int(order(epoch)[place])

    return grain.MapDataset.range(sys.maxsize).map(index)


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
        with contextlib.suppress(ValueError):  # texts that are no numbers are sorted as texts
            values = [float(text) for text in values]
    nan = [index for index, value in enumerate(values) if isinstance(value, float) and math.isnan(value)]
    if nan:  # it has no place in an order, and others beside it would lose theirs
        raise DataError(
            f"data.curriculum={column} must hold values that can be sorted, got NaN in prompt {nan[0]} (from 0); give "
            "it a number"
        )
    try:
        order = {value: rank for rank, value in enumerate(sorted(set(values)))}
    except TypeError as error:
        raise DataError(
            f"data.curriculum={column} must hold values that can be sorted, numbers or texts, got {error}; make them "
            "of one kind"
        ) from error
    return np.array([order[value] for value in values])
