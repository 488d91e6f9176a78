"""What the steps that are done have shown of each prompt, and how far they came; the next ones know it.

    with PromptHistory.open(run_dir, prompts=7473, start=120, hosts=hosts) as history:     # steps 1 to 120 are done
        known = history.last("tokens", batch.records)                   # [103.5, None, ...]: None if nothing is known
        history.add(121, 968, batch.records, {"tokens": [88.0, 412.25, ...], "pass_rate": [0.5, 0.125, ...]})

``history.jsonl`` has a line per step with the numbers of its prompts and what became known of each, and the position in
the order of the prompts at which the next step begins. Host 0 writes it, cuts it back to the steps that are done when a
run continues, and tells the others. So a continued run knows what the run would have known that was not interrupted,
and nothing else.
"""

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Float

from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.json_lines import encode_line, keep_records, read_records
from tpu_grpo.observe.run_files import HISTORY_FILE

COLUMNS = ("tokens", "pass_rate")
"""``tokens`` is the mean length of the completions of a prompt's group, ``pass_rate`` the mean of their reward."""
PASSES = "passes"
"""How often in a row a prompt was passed; it follows from the pass rates, and is in no file."""


class PromptHistory:
    """A number of each kind for every prompt, NaN where nothing is known.

    Args:
        prompts: how many there are.
        passed_at: the pass rate from which a prompt counts as passed; None if nobody asks.
    """

    def __init__(self, prompts: int, passed_at: float | None = None):
        self.position: int | None = 0
        """Where the next step begins; None if the file does not say it."""
        self._passed_at = math.inf if passed_at is None else passed_at
        self._table = {name: np.full(prompts, np.nan) for name in COLUMNS} | {PASSES: np.zeros(prompts)}
        self._file: IO[bytes] | None = None

    @classmethod
    def open(
        cls, run_dir: Path, prompts: int, start: int, hosts: Hosts, passed_at: float | None = None
    ) -> "PromptHistory":
        """Take up the history of a run at the step after ``start``; every host calls this.

        Raises:
            DataError: on host 0, if the file is broken elsewhere than in its last line.
        """
        history = cls(prompts, passed_at)
        if hosts.is_first:
            path, done = run_dir / HISTORY_FILE, 0
            keep_records(path, lambda record: record["step"] <= start)
            for record in read_records(path, missing_ok=True):
                history._take_in(record["prompts"], record)
                history.position, done = record.get("position"), record["step"]
            if done != start:
                history.position = None
            history._file = path.open("ab")
        if start:
            history._decode(hosts.broadcast("the history of the prompts", history._encode()))
        return history

    def known(self, name: str) -> Float[np.ndarray, " prompts"]:
        """Return what is known under a name of all prompts, NaN where nothing is; not to be written to."""
        return self._table[name]

    def last(self, name: str, records: Sequence[int]) -> list[float | None]:
        """Return what is known under a name of these prompts, by their numbers; None of those never trained on."""
        return [None if np.isnan(value) else float(value) for value in self._table[name][list(records)]]

    def add(self, step: int, position: int, records: Sequence[int], values: Mapping[str, Sequence[float]]) -> None:
        """Take in what a step has shown of its prompts, and where the next begins.

        Of a prompt that stands there twice, the last counts. The line is on disk when this returns, so that a
        checkpoint that is saved afterwards never lacks it.
        """
        self._take_in(records, values)
        self.position = position
        if self._file is not None:
            line = {"step": step, "position": position, "prompts": list(records), **values}
            self._file.write(encode_line(line))
            self._file.flush()
            os.fsync(self._file.fileno())

    def _take_in(self, records: Sequence[int], values: Mapping[str, Sequence[float | None]]) -> None:
        for name in COLUMNS:
            numbers = np.array(values.get(name), np.float64)  # null, or no entry at all, becomes NaN
            self._table[name][list(records)] = numbers
        passes, rates = self._table[PASSES], np.broadcast_to(np.array(values.get("pass_rate"), float), len(records))
        for record, rate in zip(records, rates, strict=True):
            passes[record] = passes[record] + 1 if rate >= self._passed_at else 0

    def _encode(self) -> bytes:
        position = np.array([-1 if self.position is None else self.position])
        return zlib.compress(position.tobytes() + b"".join(column.tobytes() for column in self._table.values()), 1)

    def _decode(self, told: bytes) -> None:
        data = zlib.decompress(told)
        position = int(np.frombuffer(data[:8], np.int64)[0])
        self.position = None if position < 0 else position
        columns = np.frombuffer(data[8:], np.float64).reshape(len(self._table), -1)
        self._table = {name: column.copy() for name, column in zip(self._table, columns, strict=True)}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "PromptHistory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
