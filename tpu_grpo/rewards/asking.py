"""Asking one reward about the rows of a table, and doing with its problems what the config says."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import RewardSpec
from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.answers import Problem
from tpu_grpo.rewards.loading import LoadedReward, workers_of
from tpu_grpo.rewards.pool import Place
from tpu_grpo.rewards.tables import Table, cut, name_row
from tpu_grpo.types import Figure

LOG = logging.getLogger("tpu_grpo.rewards")


@dataclass
class Asked:
    """One reward's part of a step."""

    values: Float[np.ndarray, " B"]
    """float64; NaN where the reward does not apply."""
    skipped: Bool[np.ndarray, " B"]
    """Rows that go without it because of a problem."""
    seconds: float = 0.0
    timeouts: int = 0
    """Rows without an answer in time."""
    errors: int = 0
    """Rows with any other problem."""
    logged: dict[str, list[float]] = field(default_factory=dict)

    def figures(self, name: str) -> dict[str, Figure]:
        """Values for the metrics, by full name."""
        return {
            f"rewards/{name}/seconds": Figure(self.seconds, "max"),
            f"rewards/{name}/timeouts": Figure(self.timeouts, "sum"),
            f"rewards/{name}/errors": Figure(self.errors, "sum"),
            **{f"rewards/{name}/{k}": Figure(float(np.mean(v)), "mean", len(v)) for k, v in self.logged.items()},
        }


class RemoteError(Exception):
    """What a reward raised, as the text of its traceback."""


def ask(
    spec: RewardSpec, loaded: LoadedReward, place: Place, table: Table, gate_B: Float[np.ndarray, " B"] | None
) -> Asked:
    """One reward's values for all rows.

    A row that the gate scored 0 or less gets 0, one the gate does not apply to gets NaN; neither is asked about.

    Raises:
        RewardError: for a problem, if ``on_error`` is stop.
    """
    started = time.perf_counter()
    rows = range(table.size) if gate_B is None else [int(row) for row in np.flatnonzero(gate_B > 0)]
    result = Asked(np.full(table.size, np.nan), np.zeros(table.size, dtype=bool))
    if gate_B is not None:
        result.values[gate_B <= 0] = 0.0
    names = [*loaded.arguments, *(n for n in loaded.call.extras if n == "completion_ids")]
    batches = cut(rows, table.group_size, workers_of(spec), loaded.call)
    answers = place.run([table.batch(names, batch) for batch in batches], spec.timeout)
    for batch, answer in zip(batches, answers, strict=True):
        result.values[batch] = answer.values
        for name, values in answer.logged.items():
            result.logged.setdefault(name, []).extend(values)
        for problem in answer.problems:
            _weigh(spec, problem, batch, table, result)
    result.seconds = time.perf_counter() - started
    return result


def _weigh(spec: RewardSpec, problem: Problem, batch: Sequence[int], table: Table, result: Asked) -> None:
    rows = list(batch) if problem.row is None else [batch[problem.row]]
    message = _describe(spec, problem, batch, rows, table)
    if spec.on_error == "stop":
        raise RewardError(message) from (RemoteError(problem.trace) if problem.trace else None)
    if result.timeouts + result.errors == 0:  # the metrics count the rest
        LOG.warning("step %d: %s", table.step, message)
    if problem.kind == "late":
        result.timeouts += len(rows)
    else:
        result.errors += len(rows)
    result.values[rows] = np.nan if spec.on_error == "skip" else spec.error_value
    result.skipped[rows] = spec.on_error == "skip"


def _describe(spec: RewardSpec, problem: Problem, batch: Sequence[int], rows: Sequence[int], table: Table) -> str:
    """What happened where, and what to do about it."""
    what = f"reward {spec.shown} {problem.text}"
    where = name_row(rows[0], table) if len(rows) == 1 else f"{len(rows)} rows from {rows[0]} to {rows[-1]}"
    match problem.kind:
        case "late":
            return f"{what} within its timeout of {spec.timeout:g} s, for {where}; make it faster, or raise timeout"
        case "died":
            return f"{what}, for {where}; a reward must not end its process, nor want more memory than there is"
        case "raised" if problem.culprit is not None:
            culprit = name_row(batch[problem.culprit], table)
            return f"{what}; {culprit} raises on its own. Return None for rows the reward does not apply to"
        case "raised" if problem.row is None:
            return f"{what}; no row raises on its own, so it takes several together"
        case "raised":
            return f"{what}; for {where}. Return None for rows the reward does not apply to"
    return what if problem.row is None else f"{what} for {where}"
