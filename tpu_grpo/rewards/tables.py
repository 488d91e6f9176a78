"""The rows of a rollout as columns, and cutting them into batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.answers import SHORT, Batch, Call
from tpu_grpo.rewards.protocol import TEXT_ARGUMENTS
from tpu_grpo.types import Rollout

if TYPE_CHECKING:
    from tpu_grpo.rewards.scoring import OpenReward

_BATCHES_PER_WORKER = 4
"""So that a slow batch does not keep a worker busy while the others are done."""


@dataclass(frozen=True)
class Table:
    """Prompts, completions, completion_ids and the data columns that rewards ask for, by name, each [B]."""

    columns: dict[str, Sequence[Any]]
    step: int
    group_size: int

    @property
    def size(self) -> int:
        """B."""
        return len(self.columns["completions"])

    def batch(self, names: Sequence[str], rows: Sequence[int]) -> Batch:
        """Some columns of some rows."""
        return Batch({name: [self.columns[name][row] for row in rows] for name in names}, self.step, len(rows))


def table_of(rollout: Rollout, rewards: "Sequence[OpenReward]") -> Table:
    """The columns that the rewards ask for.

    Raises:
        RewardError: for a row that lacks one of them.
    """
    rows = rollout.row_prompts
    columns: dict[str, Sequence[Any]] = {"prompts": [p.text for p in rows], "completions": list(rollout.texts)}
    if any("completion_ids" in r.loaded.call.extras for r in rewards):
        columns["completion_ids"] = [c.token_ids.tolist() for c in rollout.completions]
    table = Table(columns, rollout.batch.step, rollout.group_size)
    for name in sorted({name for r in rewards for name in r.loaded.arguments} - set(TEXT_ARGUMENTS)):
        lacking = next((i for i, p in enumerate(rows) if name not in p.columns), None)
        if lacking is not None:
            raise RewardError(
                f"rewards were opened for data with the column {name!r}, which {name_row(lacking, table)} lacks; it "
                f"has {sorted(rows[lacking].columns)}. Add the column to the data"
            )
        columns[name] = [p.columns[name] for p in rows]
    return table


def cut(rows: Sequence[int], group_size: int, workers: int, call: Call) -> list[list[int]]:
    """Rows in batches: all in one for one worker, else a few per worker, of whole groups unless rows stand alone.

    Two workers, groups of 2, rows 0 to 7: ``[[0, 1], [2, 3], [4, 5], [6, 7]]``. Async calls for single rows wait for
    each other's batches, so there is one batch per worker of them.
    """
    by_row = call.concurrency is not None
    if not rows or (workers <= 1 and not by_row):
        return [list(rows)] if rows else []
    most = max(1, workers) * (1 if call.is_async else _BATCHES_PER_WORKER)
    keys = list(range(len(rows))) if by_row else [row // group_size for row in rows]
    distinct = list(dict.fromkeys(keys))
    each = math.ceil(len(distinct) / most)
    batch_of = {key: i // each for i, key in enumerate(distinct)}
    batches: list[list[int]] = [[] for _ in range(math.ceil(len(distinct) / each))]
    for row, key in zip(rows, keys, strict=True):
        batches[batch_of[key]].append(row)
    return batches


def name_row(row: int, table: Table) -> str:
    """A row for people: its number, and the beginnings and ends of its texts."""
    prompt, completion = table.columns["prompts"][row], table.columns["completions"][row]
    return f"row {row} (prompt {SHORT.repr(prompt)}, completion {SHORT.repr(completion)})"
