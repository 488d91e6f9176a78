"""The metrics of a step's updates, from what their passes measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpu_grpo.algorithms import correction_metrics
from tpu_grpo.learner.agreement import agreement_metrics
from tpu_grpo.learner.loss import LossSums
from tpu_grpo.learner.update_records import UpdateRecord


@dataclass(frozen=True)
class MeasuredUpdate:
    """One of a step's updates, on the host."""

    sums: list[LossSums]
    """Of each of its passes."""
    record: UpdateRecord

    @property
    def loss(self) -> float:
        """The loss over all passes."""
        return sum(float(each.loss) for each in self.sums)


def update_metrics(updates: Sequence[MeasuredUpdate]) -> dict[str, float]:
    """Compute ``update/*`` and ``correction/*`` over all updates, and ``agreement/*`` over the tokens of the first.

    The weights before the first update are those that the engine sampled with.

    The loss is the mean over updates of each update's loss; entropy, KL and clip fraction are means over tokens; the
    gradient norm is the mean over updates of each update's norm before clipping; the rate is the last update's, and of
    the kept steps the smallest counts. Updates that were skipped count in none of these, unless all were.
    """
    made = [update for update in updates if update.record.finite] or list(updates)
    micro, records = [sums for update in made for sums in update.sums], [update.record for update in made]
    tokens = sum(float(sums.agreement.tokens) for sums in micro)
    corrected = [sums.correction for sums in micro if sums.correction is not None]

    def mean(values: Sequence[Any], count: float) -> float:
        numbers = [float(value) for value in values]
        total = math.fsum if all(map(math.isfinite, numbers)) else sum  # fsum raises for infinities of both signs
        return total(numbers) / count

    return {
        "update/loss": mean([sums.loss for sums in micro], len(made)),
        "update/grad_norm": mean([record.grad_norm for record in records], len(made)),
        "update/step_kept": min(float(record.step_kept) for record in records),
        "update/kl": mean([sums.kl for sums in micro], tokens),
        "update/entropy": mean([sums.entropy for sums in micro], tokens),
        "update/clip_fraction": mean([sums.clipped for sums in micro], tokens),
        "update/learning_rate": float(records[-1].learning_rate),
        "update/skipped": sum(not update.record.finite for update in updates),
        **agreement_metrics([sums.agreement for sums in updates[0].sums]),
        **(correction_metrics(corrected) if corrected else {}),
        **_entropy_metrics(updates[-1].record),
    }


def _entropy_metrics(record: UpdateRecord) -> dict[str, float]:
    """Say what the last update multiplied its entropy with, where that is adapted."""
    coefficient = record.entropy_coefficient
    return {} if coefficient is None else {"update/entropy_coefficient": float(coefficient)}
