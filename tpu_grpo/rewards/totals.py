"""What the rewards gave for a row becomes its total, and rows that none of them scores take their group's mean.

    weights         1      0.5    0
    a group of 3    1.0    None   7.0     total 1.0
                    1.0    4.0    None    total 3.0
                    None   None   7.0     total 2.0, the mean of the others: it counts in `Scores.unscored`

A reward of weight 0 is only watched and scores no row, unless all weights are 0. Rewards of single tokens have no part
in the total. A group of which no row is scored has the totals 0, and teaches nothing.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Rollout, Scores
from tpu_grpo.rewards.asking import RewardResult
from tpu_grpo.rewards.batches import Table, describe_row
from tpu_grpo.rewards.conversations import failure_of

LOG = logging.getLogger("tpu_grpo.rewards")
UNSCORED = "rewards/unscored"
"""This metric counts the rows of a step that no reward applies to."""


@dataclass(frozen=True)
class Totals:
    """Totals are the sums of B rows, and say which of them have none of their own."""

    total: Float[np.ndarray, " B"]
    unscored: Bool[np.ndarray, " B"]
    """No reward of whole completions scores these rows; their total is their group's mean."""
    without: Bool[np.ndarray, " B"]
    """Neither does a reward of single tokens."""


def add_up(
    results: Mapping[str, RewardResult], weights: Sequence[float], table: Table, of_tokens: Collection[str]
) -> Totals:
    """Add up the rewards that are not ``of_tokens``, with their weights, and fill in the rows that they do not score.

    A row whose environment failed is worth what the config says, to each reward and in total, or counts as not scored.

    The first row that no reward applies to, without a problem of any, is written to the log.
    """
    total_B = np.zeros(table.size)
    scored_B, any_B, skipped_B = (np.zeros(table.size, dtype=bool) for _ in range(3))
    counts = [weight != 0.0 or not any(weights) for weight in weights]
    for (name, result), weight, rewarded in zip(results.items(), weights, counts, strict=True):
        if name not in of_tokens:
            for row, failure in table.failures.items():
                result.values[row] = np.nan if failure.reward is None else failure.reward
        applies_B = ~np.isnan(result.values)
        any_B |= applies_B & rewarded
        skipped_B |= result.skipped
        if name not in of_tokens:  # in order: the same bits on every host
            total_B += np.where(applies_B, weight * result.values, 0.0)
            scored_B |= applies_B & rewarded
    if not set(results) - set(of_tokens):
        scored_B[:] = True  # all totals are 0, as they should be
    for row, failure in table.failures.items():
        total_B[row], scored_B[row] = failure.reward or 0.0, failure.reward is not None
    if rows := np.flatnonzero(~any_B & ~skipped_B).tolist():
        LOG.warning("step %d: %s; such a row takes the mean of its group", table.step, _lacking(results, rows, table))
    return Totals(_filled(~scored_B, total_B, table.group_size), ~scored_B, ~any_B)


def check_some_scored(rollout: Rollout, scores: Scores) -> None:
    """See that some row of a rollout is scored, or else that a problem of a reward, which was passed over, is why.

    Raises:
        RewardError: if every reward that has a weight gave None for all rows.
    """
    rows = len(rollout.texts)
    problems = sum(f.value for n, f in scores.figures.items() if n.endswith(("/errors", "/timeouts")))
    if scores.figures[UNSCORED].value < rows or problems or any(map(failure_of, rollout.completions)):
        return
    raise RewardError(
        f"some row of a step needs a reward that applies, got None from all of {', '.join(scores.by_name)} for all "
        f"{rows} rows of step {rollout.batch.step}, the first for the prompt {rollout.batch.prompts[0].text[:120]!r} "
        f"with the completion {rollout.texts[0][:120]!r}; drop such records from the data, or add a reward that scores "
        "them"
    )


def _lacking(names: Collection[str], rows: Sequence[int], table: Table) -> str:
    others = f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""
    return f"no reward of {', '.join(names)} applies to {describe_row(rows[0], table)}{others}"


def _filled(
    lacking_B: Bool[np.ndarray, " B"], total_B: Float[np.ndarray, " B"], group_size: int
) -> Float[np.ndarray, " B"]:
    """Give rows without a reward the mean of their group's others, or 0 if there is none."""
    if not lacking_B.any():
        return total_B
    lacking_PG, total_PG = lacking_B.reshape(-1, group_size), total_B.reshape(-1, group_size)
    known_P = np.maximum(1, (~lacking_PG).sum(axis=1))
    mean_P = np.where(lacking_PG, 0.0, total_PG).sum(axis=1) / known_P
    return np.where(lacking_PG, mean_P[:, None], total_PG).reshape(-1)
