"""What is known of each prompt from the last time it was trained on; the prompts of an epoch know the epoch before.

    with PromptHistory.open(run_dir, prompts=7473, start=120, hosts=hosts) as history:     # steps 1 to 120 are done
        known = history.last("tokens", batch.records)                   # [103.5, None, ...]: None if nothing is known
        history.add(121, batch.records, {"tokens": [88.0, 412.25, ...]})

``history.jsonl`` has a line per step with the numbers of its prompts and what became known of each. Host 0 writes it,
cuts it back to the steps that are done when a run continues, and tells the others. So a continued run knows what the
run would have known that was not interrupted, and nothing else.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from tpu_grpo.hosts import Hosts
from tpu_grpo.metrics.jsonl import encode_line, keep_records, read_records
from tpu_grpo.metrics.run_files import HISTORY_FILE

COLUMNS = ("tokens",)
"""``tokens`` is the mean length of the completions of a prompt's group."""


class PromptHistory:
    """A number of each kind for every prompt, or none."""

    def __init__(self, table: Mapping[str, np.ndarray], file: IO[bytes] | None = None):
        self._table = dict(table)
        self._file = file

    @classmethod
    def open(cls, run_dir: Path, prompts: int, start: int, hosts: Hosts) -> "PromptHistory":
        """Take up the history of a run at the step after ``start``; every host calls this.

        Raises:
            DataError: on host 0, if the file is broken elsewhere than in its last line.
        """
        table, file = np.full((len(COLUMNS), prompts), np.nan), None
        if hosts.is_first:
            path = run_dir / HISTORY_FILE
            keep_records(path, lambda record: record["step"] <= start)
            for record in read_records(path, missing_ok=True):
                for row, name in zip(table, COLUMNS, strict=True):
                    row[record["prompts"]] = np.array(record.get(name), np.float64)
            file = path.open("ab")
        if start:
            told = hosts.broadcast("the history of the prompts", table.tobytes())
            table = np.frombuffer(told, np.float64).reshape(table.shape).copy()
        return cls(dict(zip(COLUMNS, table, strict=True)), file)

    def last(self, name: str, records: Sequence[int]) -> list[float | None]:
        """Return what is known under a name of these prompts, by their numbers; None of those never trained on."""
        return [None if np.isnan(value) else float(value) for value in self._table[name][list(records)]]

    def add(self, step: int, records: Sequence[int], values: Mapping[str, Sequence[float]]) -> None:
        """Take in what a step has shown of its prompts; of a prompt that stands there twice, the last counts."""
        for name in COLUMNS:
            self._table[name][list(records)] = values[name]
        if self._file is not None:
            self._file.write(encode_line({"step": step, "prompts": list(records), **values}))
            self._file.flush()

    def __enter__(self) -> "PromptHistory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
