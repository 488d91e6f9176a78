r"""Mathematical answers labelled by hand, with the traps: commas, units, fractions, several boxes, none."""

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import math_verify
import numpy as np
import pytest

from tests.goldens import labelled
from tests.rewards.conftest import make_rollout, scored
from tests.rewards.shipped.test_correctness import LABELLED, gsm8k_references
from tpu_grpo.config import RewardSpec
from tpu_grpo.rewards.shipped import mathematics
from tpu_grpo.rewards.shipped.correctness import verified
from tpu_grpo.rewards.shipped.mathematics import math

PAIRS = Path(__file__).parent / "math_pairs.jsonl"
"""Lines of style, reference, completion, and whether a person calls the completion right."""

IN_GARBAGE_COLLECTION = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A time-out may come while a callback of jax or hypothesis runs, which ignores it with a warning; the next counts."""

CASES = [*labelled(LABELLED, "math"), (r"\boxed{1" + "0" * 400 + "}", "#### 1e400", 1.0)]

# Right completions whose box says what the reference says, with or without its unit.
REFERENCES = labelled(LABELLED, "references")


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


@pytest.mark.parametrize(("reference", "box"), REFERENCES)
def test_a_reference_is_read_as_people_write_it(reference: str, box: str):
    assert math(f"So the result is \\boxed{{{box}}}.", reference) == 1.0
    assert math(r"So the result is \boxed{977}.", reference) == 0.0


def test_right_answers_are_paid_and_wrong_ones_are_not():
    """Nothing wrong is paid here, though math-verify alone pays some of it."""
    pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    scores = [math(pair["completion"], pair["reference"]) for pair in pairs]
    differ = [pair for pair, score in zip(pairs, scores, strict=True) if score != float(pair["right"])]
    assert len(pairs) >= 200
    assert len({pair["style"] for pair in pairs}) == 5
    assert not differ


def test_math_verify_alone_still_misses_some_of_them():
    """If math-verify reads these by itself, the reward's own reading is no longer needed."""
    for completion, reference in [
        (r"\boxed{1\,550}", "1550"),
        (r"\boxed{12 1/2}", "12.5"),
        (r"\boxed{3\frac{1}{2}}", r"3\frac{1}{2}"),
        (r"\boxed{18 dollars}", "18 dollars"),
        (r"\boxed{(3,-2)}", "(3, -2)"),
        ("<answer>18</answer>", "18"),
    ]:
        assert not math_verify.verify(math_verify.parse(reference), math_verify.parse(completion))
        assert math(completion, reference) == 1.0


@pytest.mark.full
def test_math_on_the_reference_solutions_of_gsm8k():
    for reference in gsm8k_references():
        value = int(reference.rpartition("#### ")[2].replace(",", ""))
        assert math(f"Thus \\boxed{{{value}}}", reference) == 1.0
        assert math(f"Thus \\boxed{{{value + 1}}}", reference) == 0.0


@IN_GARBAGE_COLLECTION
@pytest.mark.parametrize(
    ("completion", "reference"),
    [
        ("9" * 5000, "3"),  # Python refuses to convert so many digits
        ("3", "9" * 5000),
        (r"\boxed{" + "9^{" * 4 + "9" + "}" * 4 + "}", "3"),
        (r"\boxed{10^{10^{10}}}", "3"),
        (r"\boxed{3}", "10^{10^{10}}"),
        ("10^10^10", "3"),
        (r"\boxed{100000000!}", "3"),
        (r"\boxed{\binom{1000000000}{500000000}}", "3"),
        (r"\boxed{" + "{" * 3000 + "}" * 3000 + "}", "3"),
    ],
)
def test_what_cannot_be_parsed_or_compared_is_not_right_and_is_counted(completion: str, reference: str):
    logged: list[Any] = []
    started = time.perf_counter()
    assert math(completion, reference, seconds=1, log_metric=lambda *a: logged.append(a)) == 0.0
    assert logged == [("unverified", 1.0)]
    assert time.perf_counter() - started < 5.0


@pytest.mark.parametrize("reference", ["12:00", "3:0", "１２", "٣", "10^{10^{10}}", r"\boxed{\boxed{7}}", "1e400"])
def test_the_text_of_the_reference_is_right(reference: str):
    assert math(f"Thus \\boxed{{{reference}}}", reference) == 1.0
    assert math(r"Thus \boxed{8}", reference) == 0.0


@pytest.mark.parametrize("reference", [r"\boxed{5", r"\frac{1}{", "$", "####", "nan", float("nan"), "\ud800", ":"])
def test_no_reference_raises(reference: Any):
    assert math(r"\boxed{8}", reference) in (0.0, None)


def test_a_group_of_huge_powers_takes_no_time():
    started = time.perf_counter()
    assert [math(f"\\boxed{{10^{{10^{{{n}}}}}}}", "3") for n in range(10, 74)] == [0.0] * 64
    assert time.perf_counter() - started < 5.0


def test_a_wrong_answer_is_not_counted():
    logged: list[Any] = []
    assert math(r"\boxed{4}", "3", log_metric=lambda *a: logged.append(a)) == 0.0
    assert logged == [("unverified", 0.0)]  # so that the metric's mean is the share


def test_other_rewards_leave_out_what_math_does_not_score():
    assert verified("math", ["Answer is forty two.", r"\boxed{3}"], ["Answer is forty three.", "3 eggs"]) == [None, 1.0]


@pytest.mark.full
@IN_GARBAGE_COLLECTION
def test_many_comparisons_without_an_end_do_not_add_up(monkeypatch: pytest.MonkeyPatch):
    """Sixty texts that take five seconds each would end a run, because the reward itself has 60 seconds."""
    monkeypatch.setattr(mathematics, "_TIME_OUTS", deque([time.monotonic()] * 5, maxlen=5))
    started, logged = time.perf_counter(), list[Any]()
    for number in range(20):
        text = "\\boxed{" + "{" * (3000 + number) + "}" * (3000 + number) + "}"
        assert math(text, "5", log_metric=lambda *a: logged.append(a)) == 0.0
    assert logged == [("unverified", 1.0)] * 20
    assert time.perf_counter() - started < 20.0  # one alone takes its five seconds
