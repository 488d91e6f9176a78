r"""Mathematical answers labelled by hand, with the traps: commas, units, fractions, several boxes, none."""

import time
from typing import Any

import numpy as np
import pytest

from tests.rewards.conftest import make_rollout, scored
from tpu_grpo.config import RewardSpec
from tpu_grpo.rewards.shipped.mathematics import math

CASES = [
    # numbers
    (r"So the answer is \boxed{42}.", "42", 1.0),
    (r"So the answer is \boxed{41}.", "42", 0.0),
    ("The answer is 42", "42", 1.0),
    (r"\boxed{1,234,567}", "1234567", 1.0),
    (r"\boxed{1234567}", "1,234,567", 1.0),
    (r"\boxed{1234}", "1,234,567", 0.0),
    (r"\boxed{-7}", "-7", 1.0),
    (r"\boxed{7}", "-7", 0.0),
    (r"\boxed{18.0}", "18", 1.0),
    (r"\boxed{1.8\times 10^1}", "18", 1.0),
    # units and signs
    (r"\boxed{18 \text{ cm}}", "18", 1.0),
    (r"\boxed{\$18}", "18", 1.0),
    (r"\boxed{50\%}", "50", 1.0),
    (r"\boxed{90^\circ}", "90", 1.0),
    # fractions
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
    (r"\boxed{\dfrac{3}{7}}", r"\frac37", 1.0),
    (r"\boxed{1/2}", r"\frac{1}{2}", 1.0),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0.0),
    (r"\boxed{0.33}", r"\frac{1}{3}", 0.0),
    # several boxes, nested, none
    (r"First \boxed{5}, no: \boxed{6}", "6", 1.0),
    (r"First \boxed{5}, no: \boxed{6}", "5", 0.0),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", 1.0),
    ("I do not know.", "6", 0.0),
    ("", "6", 0.0),
    (r"\boxed{}", "6", 0.0),
    # expressions, sets, intervals, tuples
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
    (r"\boxed{x^2+2x}", "(x+1)^2", 0.0),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
    (r"\boxed{(1, 2)}", "(1, 2)", 1.0),
    (r"\boxed{(2, 1)}", "(1, 2)", 0.0),
    (r"\boxed{[0, 1)}", "[0, 1)", 1.0),
    (r"\boxed{[0, 1]}", "[0, 1)", 0.0),
    (r"\boxed{\pi}", r"\pi", 1.0),
    # references
    ("The answer is 18", "She makes 9*2=<<9*2=18>>18.\n#### 18", 1.0),
    (r"\boxed{3}", r"We get $x = 3$, so the answer is $\boxed{3}$.", 1.0),
    (r"\boxed{3}", 3, 1.0),
    (r"\boxed{3}", None, None),
    (r"\boxed{3}", " ", None),
]


@pytest.mark.parametrize(("completion", "answer", "expected"), CASES)
def test_math(completion: str, answer: Any, expected: float | None):
    assert math(completion, answer) == expected


def test_without_a_box_where_one_is_wanted():
    assert math("The answer is 42", "42", boxed_only=True) == 0.0
    assert math(r"\boxed{42}", "42", boxed_only=True) == 1.0


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_wherever_it_runs_the_scores_are_the_same(workers: int):
    """Without workers it runs off the main thread."""
    columns = [{"answer": answer} for _, answer, _ in CASES]
    rollout = make_rollout(["p"] * len(CASES), [c for c, _, _ in CASES], columns)
    specs = [RewardSpec(name="math", workers=workers), RewardSpec(name="repetition", weight=0.0)]
    values = scored(rollout, *specs).by_name["math"]
    np.testing.assert_array_equal(values, np.array([e for *_, e in CASES], dtype=np.float64))


def test_what_cannot_be_compared_in_time_scores_nothing_and_is_counted():
    logged: list[tuple[str, float]] = []
    started = time.perf_counter()
    tower = r"\boxed{" + "9^{" * 4 + "9" + "}" * 4 + "}"
    assert math(tower, "3", seconds=1, log_metric=lambda *a: logged.append(a)) == 0.0
    assert time.perf_counter() - started < 5.0
