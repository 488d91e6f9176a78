"""Draws each step's prompts from the stream: in order, from where the step before ended, skipping some by pass rate.

    with PromptDraw.open(run_dir, data, stream, start=120, hosts=hosts, ...) as draw:      # steps 1 to 120 are done
        batch = draw.batch(121)                      # the first batch of step 121
        more = draw.batch(121, after=batch)          # the second, if dynamic sampling needs it
        draw.done(121, used, values)                 # step 122 begins after the last prompt of ``used``

The stream assigns a prompt to each position, and prompt_selection.py a weight to each prompt: the probability that it
is sampled when the draw reaches it. For prompts a (weight 1), b (weight 0.2) and c (retired), a step of two
from position 4 on could be:

    position     4  5  6  7  8
    prompt       b  c  a  a  b        whether b is sampled depends only on seed and position
    sampled      -  -  a  a  .        so the next step begins at position 8

With dynamic sampling, a step may sample prompts that it does not use; the next step begins after the last used prompt.
With P prompts per step, and without pools, retirement and dynamic sampling, step s has positions (s - 1) P to s P - 1.

``history.jsonl`` has a line per step: the indices of its prompts, their results, and the position at which the next
step begins. Host 0 writes the file. When a run continues, host 0 truncates the file to the completed steps and sends
the history to all hosts. A continued run therefore has exactly the history of an uninterrupted run.

    history = PromptHistory.open(run_dir, prompts=7473, start=120, hosts=hosts)     # steps 1 to 120 are done
    known = history.last("tokens", batch.records)                   # [103.5, None, ...]: None without a result
    history.add(121, 968, batch.records, {"tokens": [88.0, 412.25, ...], "pass_rate": [0.5, 0.125, ...]})
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import DataSection
from tpu_grpo.data.prompt_selection import Selection
from tpu_grpo.data.stream import PromptStream
from tpu_grpo.hosts import Hosts, packed, unpacked
from tpu_grpo.observe.run_files import HISTORY_FILE
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.json_files import encode_line, keep_steps, read_steps
from tpu_grpo.records.stages import PromptBatch

FATE = 1
"""This number is part of the seed of the draws, so that they differ from other random numbers of the run."""
COLUMNS = ("tokens", "pass_rate")
"""``tokens`` is the mean length of the completions to a prompt in a step, ``pass_rate`` their mean reward."""
PASSES = "passes"
"""The number of times in a row that a prompt was passed; computed from its pass rates, not stored in the file."""


class PromptHistory:
    """The latest result of every prompt for each of ``COLUMNS`` (NaN before the first), and its consecutive passes.

    A prompt is passed if its pass rate is at least ``passed_at``; None means that passes are not counted.
    """

    def __init__(self, prompts: int, passed_at: float | None = None):
        self.position: int | None = 0
        """The position at which the next step begins; None if the file lacks the last completed step."""
        self._passed_at = math.inf if passed_at is None else passed_at
        self._table = {name: np.full(prompts, np.nan) for name in COLUMNS} | {PASSES: np.zeros(prompts)}
        self._file: IO[bytes] | None = None

    @classmethod
    def open(cls, run_dir: Path, prompts: int, start: int, hosts: Hosts, passed_at: float | None = None) -> Self:
        """Read the history of a run up to step ``start``; every host calls this. Raises DataError on host 0, if a line
        other than the last one is broken."""
        history = cls(prompts, passed_at)
        if hosts.is_first:
            path, done = run_dir / HISTORY_FILE, 0
            keep_steps(path, start)
            for record in read_steps(path):
                try:
                    history._take_in(record["prompts"], record)
                    history.position, done = int(record["position"]), record["step"]
                except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
                    raise DataError(
                        f"{path}: every line must be as a run writes it, got {error!r} in that of step "
                        f"{record['step']}; restore the file, or move it away"
                    ) from error
            if done != start:
                history.position = None
            history._file = path.open("ab")
        if start:
            history._share(hosts)
        return history

    def known(self, name: str) -> Float[np.ndarray, " prompts"]:
        """Return one column's results for all prompts, NaN for prompts without a result; do not modify the array."""
        return self._table[name]

    def last(self, name: str, records: Sequence[int]) -> list[float | None]:
        """Return one column's results for some prompts, given by index; None for prompts without a result."""
        return [None if np.isnan(value) else float(value) for value in self._table[name][list(records)]]

    def add(self, step: int, position: int, records: Sequence[int], values: Mapping[str, Sequence[float]]) -> None:
        """Add the results of a step's prompts, and the position at which the next step begins.

        If a prompt occurs twice, its last result counts. The line is on disk when this returns, so that no checkpoint
        has a step that the history lacks.
        """
        self._take_in(records, values)
        self.position = position
        if self._file is not None:
            self._file.write(encode_line({"step": step, "position": position, "prompts": list(records), **values}))
            self._file.flush()
            os.fsync(self._file.fileno())

    def _take_in(self, records: Sequence[int], values: Mapping[str, Sequence[float | None]]) -> None:
        columns = {name: np.array(values[name], np.float64) for name in COLUMNS}  # null becomes NaN
        for name, numbers in columns.items():
            self._table[name][list(records)] = numbers
        passes = self._table[PASSES]
        for record, rate in zip(records, columns["pass_rate"], strict=True):
            passes[record] = passes[record] + 1 if rate >= self._passed_at else 0

    def _share(self, hosts: Hosts) -> None:
        """Replace every host's history by host 0's."""
        columns = np.stack(list(self._table.values()))

        def read(shared: tuple[int | None, str]) -> Float[np.ndarray, "kinds prompts"]:
            self.position = shared[0]
            return unpacked(shared[1], columns.size).reshape(columns.shape)

        shared = self.position, packed(columns.reshape(-1))
        columns = hosts.broadcast("the history of the prompts", shared, tuple[int | None, str], read)
        self._table = dict(zip(self._table, columns, strict=True))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class PromptDraw:
    """Draws prompts from a stream by their history, and adds each step to the history.

    Whether a prompt is sampled depends only on ``seed``, its position and its weight. ``start`` is the number of
    completed steps.
    """

    def __init__(self, stream: PromptStream, history: PromptHistory, data: DataSection, *, seed: int, start: int):
        self.stream = stream
        self.history = history
        self._data = data
        self._seed = seed
        self._position = start * data.prompts_per_step if history.position is None else history.position
        self._passed_over = 0

    @classmethod
    def open(
        cls, run_dir: Path, data: DataSection, stream: PromptStream, start: int, hosts: Hosts, seed: int, carries: bool
    ) -> Self:
        """Open the draw of a run after its completed steps, for a ``with`` block; every host calls this. ``carries``
        says that groups of prompts outlive a step. Raises DataError for a broken history, and for one without the last
        completed step if the settings need that step."""
        history = PromptHistory.open(run_dir, stream.size, start, hosts, data.retire.at)
        if history.position is None and (data.remembers or carries):
            history.close()
            raise DataError(
                f"{HISTORY_FILE} must say where step {start} ended in the data, because data.dynamic, data.pools, "
                "data.retire, rollout.partial_extra or algorithm.staleness is set, and it does not; restore the file "
                "that belongs to the checkpoint, leave these settings out, or start over with checkpoint.resume=never"
            )
        return cls(stream, history, data, seed=seed, start=start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.history.close()

    def batch(self, step: int, after: PromptBatch | None = None) -> PromptBatch:
        """Draw a step's first batch, or the next one after ``after``; raises DataError if all prompts are excluded."""
        start, number = (self._position, 0) if after is None else (after.positions[-1] + 1, after.round + 1)
        return self.stream.at(step, self._drawn(step, start, self._data.prompts_per_round), number)

    def next(self, step: int, count: int) -> PromptBatch:
        """Draw the next ``count`` prompts and move the position past them, for a run whose groups outlive a step;
        raises as ``batch``."""
        batch = self.stream.at(step, self._drawn(step, self._position, count))
        self._move_past(batch)
        return batch

    def done(self, step: int, used: PromptBatch, values: Mapping[str, Sequence[float]]) -> None:
        """Record a step: the prompts that it used, in order of position, and their results for each of ``COLUMNS``."""
        if used.positions[-1] >= self._position:  # else ``next`` has moved past them
            self._move_past(used)
        self.history.add(step, self._position, used.records, values)

    def _move_past(self, batch: PromptBatch) -> None:
        end = batch.positions[-1] + 1 if batch.positions else self._position
        self._passed_over = end - self._position - len(batch.positions)
        self._position = end

    def metrics(self) -> dict[str, float]:
        """Return the metrics of pools and retirement after a step; empty if neither is configured."""
        return self.selection.metrics(self._passed_over)

    @property
    def selection(self) -> Selection:
        """What pools and retirement make of the history so far."""
        return Selection(self._data, self.history.known("pass_rate"), self.history.known(PASSES))

    def _drawn(self, step: int, start: int, count: int) -> list[int]:
        """Return the first ``count`` positions, from ``start`` on, whose prompts are sampled; raises as ``batch``."""
        if (why := self.selection.exhausted) is not None:
            raise DataError(f"step {step} needs prompts, and none is left: {why}")
        weights, drawn, position = self.selection.weights, list[int](), start
        while len(drawn) < count:
            weight = weights[self.stream.record(position)]
            if weight == 1.0 or (weight and np.random.default_rng([self._seed, FATE, position]).random() < weight):
                drawn.append(position)
            position += 1
        return drawn
