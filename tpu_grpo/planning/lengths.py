"""Lengths of completions with a given mean: the quantiles of a log-normal distribution that is cut at the longest.

completion_lengths(4, mean=25.0, longest=40)     # [33, 9, 18, 40], always in this order
"""

import math
import random
from statistics import NormalDist

from tpu_grpo.planning.rates import SPREAD
from tpu_grpo.records.errors import ConfigError

HALVINGS = 80


def check_mean(mean: float, longest: int) -> None:
    """Refuse a mean that completions of 1 to ``longest`` tokens cannot have.

    Raises:
        ConfigError: for such a mean.
    """
    if not 1 <= mean <= longest:
        raise ConfigError(
            f"--mean-new-tokens must be between 1 and rollout.max_new_tokens={longest}, got {mean:g}; take the mean "
            "length of the completions that you expect, completions/mean_tokens of a run"
        )


def completion_lengths(count: int, *, mean: float, longest: int) -> list[int]:
    """Return ``count`` lengths with this mean, up to rounding, always the same ones in the same mixed order.

    They are min(longest, m exp(SPREAD z)) at the quantiles z of a standard normal distribution; halving finds m.
    """
    spreads = [math.exp(SPREAD * NormalDist().inv_cdf((row + 0.5) / count)) for row in range(count)]

    def cut(median: float) -> list[float]:
        return [min(longest, median * spread) for spread in spreads]

    low, high = 0.0, longest / spreads[0]  # with the latter, all are longest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) < mean * count else (low, middle)
    lengths = [max(1, round(length)) for length in cut(high)]
    random.Random(0).shuffle(lengths)
    return lengths
