"""pass@k, majority votes and intervals, against values worked out by hand, by counting, or by scipy."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tpu_grpo.evaluation.statistics import Estimate, majority, over_problems, pass_at_k, wilson


@pytest.mark.parametrize(
    ("samples", "correct", "k", "value"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 1, 3, 3 / 4),  # 1 - C(3,3)/C(4,3) = 1 - 1/4
        (4, 1, 4, 1.0),
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (10, 3, 5, 11 / 12),  # 1 - C(7,5)/C(10,5) = 1 - 21/252
        (5, 0, 3, 0.0),
        (5, 5, 1, 1.0),
        (1, 0, 1, 0.0),
    ],
)
def test_pass_at_k_by_hand(samples: int, correct: int, k: int, value: float) -> None:
    assert pass_at_k(samples, correct, k) == pytest.approx(value, abs=1e-15)


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(sizes: tuple[int, int, int]) -> None:
    samples, correct, k = sizes
    draws = list(combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_of_many_samples_stays_exact() -> None:
    exact = 1 - math.comb(9_000, 100) / math.comb(10_000, 100)
    assert pass_at_k(10_000, 1_000, 100) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_more_than_there_are_cannot_be_drawn(k: int) -> None:
    with pytest.raises(ValueError, match=f"k must be from 1 to the number of samples, 4, got {k}"):
        pass_at_k(4, 1, k)


@pytest.mark.parametrize(
    ("answers", "right", "value"),
    [
        ("7 7 4", "7", 1.0),
        ("7 4 4", "7", 0.0),
        ("7 7 4 4 -", "7", 1 / 2),  # a tie of two
        ("7 4 5", "7", 1 / 3),
        ("7 4 5", "8", 0.0),
        ("7 - - -", "7", 1.0),  # what has no answer does not vote
        ("- -", "7", 0.0),
        ("7", "7", 1.0),
    ],
)
def test_majority_by_hand(answers: str, right: str, value: float) -> None:
    votes = [None if answer == "-" else answer for answer in answers.split()]
    assert majority(votes, [vote == right for vote in votes]) == value
    assert majority(votes[::-1], [vote == right for vote in votes[::-1]]) == value


def test_samples_of_one_answer_that_were_judged_differently_count_by_their_mean() -> None:
    assert majority(["7", "7", "7", "4"], [True, False, True, True]) == 2 / 3


@pytest.mark.parametrize(("successes", "count"), [(0, 10), (3, 10), (10, 10), (150, 512), (1, 1), (0, 1)])
def test_wilsons_interval_is_scipys(successes: int, count: int) -> None:
    expected = stats.binomtest(successes, count).proportion_ci(0.95, method="wilson")
    assert wilson(successes, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_zeros_and_ones_get_wilsons_interval() -> None:
    assert over_problems(np.array([1.0, 0, 0, 0])) == Estimate(0.25, *wilson(1, 4), 4)


def test_other_values_get_the_normal_interval_of_their_mean() -> None:
    # by hand: mean 0.5, sum of squares about it 0.0625 * 2, variance 0.0625, standard error sqrt(0.0625 / 3)
    found = over_problems(np.array([0.25, 0.5, 0.75]))
    half = 1.959963984540054 * math.sqrt(0.0625 / 3)
    assert (found.value, found.problems) == (0.5, 3)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-15)


def test_of_one_problem_nothing_is_known() -> None:
    found = over_problems(np.array([0.5]))
    assert (found.value, found.problems) == (0.5, 1)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_the_normal_interval_holds_the_truth_as_often_as_it_says() -> None:
    """500 evaluations of 200 problems, each problem with a chance of its own, 8 samples each, pass@2."""
    rng = np.random.default_rng(0)
    chances = rng.beta(0.5, 0.8, (500, 200))
    correct = rng.binomial(8, chances)
    table = np.array([pass_at_k(8, c, 2) for c in range(9)])
    grid = np.random.default_rng(1).beta(0.5, 0.8, 400_000)
    truth = float(np.mean(1 - (1 - grid) ** 2))  # pass@2 of a problem with chance p is 1 - (1 - p)^2
    found = [over_problems(table[row]) for row in correct]
    covered = np.mean([e.low <= truth <= e.high for e in found])
    assert abs(covered - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 500)
