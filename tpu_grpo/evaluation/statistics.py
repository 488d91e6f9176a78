"""Computes what a few samples say about a policy: pass@k, majority votes, and 95 % intervals.

Everything is an average over problems, of which each counts once; samples of one problem are not independent of each
other, so intervals are over problems (Miller 2024, arXiv 2411.00640, sections 2 and 3).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Float

Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


@dataclass(frozen=True)
class Estimate:
    """Holds a mean over problems with its 95 % interval; low and high are NaN where a single problem tells none."""

    value: float
    low: float
    high: float
    problems: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def over_problems(values_P: Float[np.ndarray, " P"]) -> Estimate:
    """Average one value per problem; the interval is Wilson's where all are 0 or 1, else a normal distribution's."""
    count, mean = len(values_P), float(np.mean(values_P))
    if np.isin(values_P, (0.0, 1.0)).all():
        return Estimate(mean, *wilson(int(values_P.sum()), count), count)
    if count == 1:
        return Estimate(mean, math.nan, math.nan, count)
    half = Z * float(np.std(values_P, ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Compute a proportion's score interval (Wilson 1927, JASA 22, p. 209), within [0, 1] and not empty at its ends."""
    centre = (successes + Z**2 / 2) / (count + Z**2)
    half = Z * math.sqrt(successes * (count - successes) / count + Z**2 / 4) / (count + Z**2)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the chance that k samples of a problem hold a correct one, from its ``samples`` ones.

    The chance for k of them that are drawn without replacement is 1 - C(n - c, k) / C(n, k), computed as a product
    (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    Of 4 samples with 1 correct: pass@1 = 1/4, pass@2 = 1 - C(3, 2) / C(4, 2) = 1/2, pass@4 = 1.

    Raises:
        ValueError: for a k below 1 or above the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k must be from 1 to the number of samples, {samples}, got {k}")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(samples - correct + 1, samples + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Say how right the most frequent answer is, which is maj@k of k samples; 0 if none of them has an answer.

    Answers that are equally frequent count in equal parts, as if one of them were drawn; samples that gave the same
    answer and were judged differently count by their mean.
    For the answers 7 7 4 4 -, of which 7 is correct, it is 1/2.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = Counter(answer for answer, good in zip(answers, correct, strict=True) if good)
    winners = [answer for answer, count in votes.items() if count == most]
    return float(sum(Fraction(right[answer], most) for answer in winners) / len(winners))
