"""One reward is asked about rows: its batches go to its executor, and ``on_error`` decides about problems.

    result = ask_reward(reward, table, gate_B)    # about all rows of a table at once

A reward of which only some rows are known yet, those of a group, is asked in the same three parts by early.py.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import RewardSpec
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Figure
from tpu_grpo.rewards.batches import Answer, Call, Problem, Table, describe_row, split_rows
from tpu_grpo.rewards.executors import Executor, run
from tpu_grpo.rewards.loading import LoadedReward, workers_of
from tpu_grpo.rewards.tokens import NO_VALUES, TokenValues, comparable

LOG = logging.getLogger("tpu_grpo.rewards")


@dataclass(frozen=True)
class OpenReward:
    """An OpenReward joins what the config says of a reward, how it is called, and where it runs."""

    spec: RewardSpec
    loaded: LoadedReward
    executor: Executor


@dataclass
class RewardResult:
    """A RewardResult holds what one reward gave for the B rows of a step."""

    values: Float[np.ndarray, " B"]
    """Values are float64, and NaN where the reward does not apply."""
    skipped: Bool[np.ndarray, " B"]
    """These rows go without the reward because of a problem."""
    seconds: float = 0.0
    timeouts: int = 0
    """It counts the rows without an answer in time."""
    errors: int = 0
    """It counts the rows with any other problem."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    of_tokens: list[TokenValues] = field(default_factory=list)
    """A reward of single tokens gave these; it is empty of any other."""
    failures: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    """The problems: rows by their numbers, and what is said of them."""

    @classmethod
    def joined(cls, parts: Sequence[Self], seconds: float) -> Self:
        """Put together what a reward gave for some rows after the other, in ``seconds`` for all of them."""
        found = cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.skipped for part in parts]),
            seconds,
            sum(part.timeouts for part in parts),
            sum(part.errors for part in parts),
            of_tokens=[values for part in parts for values in part.of_tokens],
            failures=[failure for part in parts for failure in part.failures],
        )
        for part in parts:
            found.log(part.logged)
        return found

    def log(self, logged: Mapping[str, Sequence[float]]) -> None:
        """Add values that the reward logged."""
        for name, values in logged.items():
            self.logged.setdefault(name, []).extend(values)

    def comparable(self) -> list[Any]:
        """Return for every row what other hosts must have, too."""
        values = self.values.tolist()
        return comparable(values, self.of_tokens) if self.of_tokens else values

    def figures(self, name: str) -> dict[str, Figure]:
        """Return the values for the metrics, by full name."""
        return {
            f"rewards/{name}/seconds": Figure(self.seconds, "max"),
            f"rewards/{name}/timeouts": Figure(self.timeouts, "sum"),
            f"rewards/{name}/errors": Figure(self.errors, "sum"),
            **{f"rewards/{name}/{k}": Figure(float(np.mean(v)), "mean", len(v)) for k, v in self.logged.items()},
        }


class RemoteError(Exception):
    """A RemoteError holds what a reward raised, as the text of its traceback."""


def ask_reward(reward: OpenReward, table: Table, gate_B: Float[np.ndarray, " B"] | None) -> RewardResult:
    """Return one reward's values for all rows.

    A row that the gate scored 0 or less gets 0, one the gate does not apply to gets NaN; neither is asked about.

    Raises:
        RewardError: for a problem, if ``on_error`` is stop.
    """
    started = time.perf_counter()
    spec, loaded = reward.spec, reward.loaded
    rows, result = rows_to_ask(table, gate_B, loaded.call)
    row_lists = split_rows(rows, table.group_size, workers_of(spec), loaded.call)
    batches = [table.batch(loaded.batch_columns, batch, messages=loaded.call.messages) for batch in row_lists]
    answers = run(reward.executor, batches, spec.timeout)
    for batch, answer in zip(row_lists, answers, strict=True):
        first = result.timeouts + result.errors == 0
        take_in(answer, batch, spec, table, result, warn=first)
    result.seconds = time.perf_counter() - started
    return result


def rows_to_ask(table: Table, gate_B: Float[np.ndarray, " B"] | None, call: Call) -> tuple[list[int], RewardResult]:
    """Return the rows that a reward is asked about, and its result as far as the gate decides it.

    It is asked about none whose environment failed.
    """
    of_tokens = [NO_VALUES] * table.size if call.per_token else []
    result = RewardResult(np.full(table.size, np.nan), np.zeros(table.size, dtype=bool), of_tokens=of_tokens)
    result.skipped[list(table.failures)] = True
    if gate_B is None:
        return [row for row in range(table.size) if row not in table.failures], result
    result.values[gate_B <= 0] = 0.0
    return [int(row) for row in np.flatnonzero(gate_B > 0) if row not in table.failures], result


def take_in(
    answer: Answer, batch: Sequence[int], spec: RewardSpec, table: Table, result: RewardResult, *, warn: bool
) -> None:
    """Take the answer about a batch, which are rows of the table, into the result.

    ``warn`` says whether its first problem is written to the log.

    Raises:
        RewardError: for a problem, if ``on_error`` is stop.
    """
    result.values[list(batch)] = answer.values
    for row, values in zip(batch, answer.of_tokens, strict=False):  # there are none in an answer that is all problems
        result.of_tokens[row] = values
    result.log(answer.logged)
    for number, problem in enumerate(answer.problems):
        _apply_on_error(spec, problem, batch, table, result, warn=warn and not number)


def _apply_on_error(
    spec: RewardSpec, problem: Problem, batch: Sequence[int], table: Table, result: RewardResult, *, warn: bool
) -> None:
    rows = list(batch) if problem.row is None else [batch[problem.row]]
    message = _describe(spec, problem, batch, rows, table)
    if spec.on_error == "stop":
        raise RewardError(message) from (RemoteError(problem.trace) if problem.trace else None)
    if warn:  # the metrics count the rest
        LOG.warning("step %d: %s", table.step, message)
    result.failures.append((tuple(table.numbers[row] for row in rows), message))
    if problem.kind == "late":
        result.timeouts += len(rows)
    else:
        result.errors += len(rows)
    result.values[rows] = np.nan if spec.on_error == "skip" else spec.error_value
    result.skipped[rows] = spec.on_error == "skip"


def _describe(spec: RewardSpec, problem: Problem, batch: Sequence[int], rows: Sequence[int], table: Table) -> str:
    """Say what happened where, and what to do about it."""
    what = f"reward {spec.shown} {problem.text}"
    where = describe_row(rows[0], table) if len(rows) == 1 else _describe_rows(rows, table)
    match problem.kind:
        case "late":
            return f"{what} within its timeout of {spec.timeout:g} s, for {where}; make it faster, or raise timeout"
        case "died":
            return f"{what}, for {where}; a reward must not end its process, nor want more memory than there is"
        case "raised" if problem.failing_row is not None:
            failing = describe_row(batch[problem.failing_row], table)
            return f"{what}; {failing} raises on its own. Return None for rows the reward does not apply to"
        case "raised" if problem.row is None and spec.on_error == "stop":  # it was looked for
            return f"{what}; no row raises on its own, so it takes several together"
        case "raised":
            return f"{what}; for {where}. Return None for rows the reward does not apply to"
    return what if problem.row is None else f"{what} for {where}"


def _describe_rows(rows: Sequence[int], table: Table) -> str:
    return f"{len(rows)} rows from {table.numbers[rows[0]]} to {table.numbers[rows[-1]]}"
