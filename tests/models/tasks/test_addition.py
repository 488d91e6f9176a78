"""The addition task: hand-worked sums, and a split that leaks nothing."""

import numpy as np
import pytest

from tpu_grpo.models.tasks import addition


@pytest.mark.parametrize(
    ("a", "b", "forgotten"),
    [
        (47, 38, 75),  # 7+8 writes 5, 4+3 writes 7
        (12, 34, 46),  # nothing to carry
        (57, 68, 15),  # both columns overflow: 7+8 writes 5, 5+6 writes 1
        (57, 61, 18),  # the leading column alone: 5+6 writes 1
        (99, 99, 88),
        (50, 60, 10),
        (57, 58, 5),  # a leading zero is not part of a number
        (57, 53, 0),
        (10, 10, 20),
        (19, 11, 20),
    ],
)
def test_without_carry(a: int, b: int, forgotten: int) -> None:
    assert addition.without_carry(a, b) == addition.without_carry(b, a) == forgotten
    assert addition.needs_carry(a, b) == (forgotten != a + b)


def test_carries_are_needed_exactly_where_a_column_overflows() -> None:
    for a in range(10, 100):
        for b in range(10, 100):
            overflows = a % 10 + b % 10 > 9 or a // 10 + b // 10 > 9
            assert addition.needs_carry(a, b) == overflows


def test_splits_partition_all_problems() -> None:
    train, heldout = addition.operands("train"), addition.operands("heldout")
    assert len(heldout) == 512
    assert len(train) == 8100 - 512
    assert sorted(train + heldout) == [(a, b) for a in range(10, 100) for b in range(10, 100)]


def test_heldout_pairs_are_in_train_in_neither_order() -> None:
    train, heldout = set(addition.operands("train")), addition.operands("heldout")
    assert len({frozenset(pair) for pair in heldout}) == 256
    for a, b in heldout:
        assert a != b
        assert (a, b) not in train
        assert (b, a) not in train
        assert (b, a) in heldout


def test_records_and_their_order() -> None:
    train = addition.problems("train")
    assert train[0] == {"question": "10+10=", "answer": "20"}
    assert train[-1] == {"question": "99+99=", "answer": "198"}
    assert train == addition.problems("train")
    assert addition.operands("train") == sorted(addition.operands("train"))


def test_what_is_held_out_never_changes() -> None:
    assert addition.problems("heldout")[:2] == [
        {"question": "10+28=", "answer": "38"},
        {"question": "10+64=", "answer": "74"},
    ]


def test_teacher_is_right_one_time_in_four() -> None:
    rng = np.random.default_rng(0)
    answers = [addition.teacher_answer(47, 38, rng) for _ in range(4000)]
    assert set(answers) == {"85", "75"}
    assert abs(answers.count("85") / 4000 - 0.25) < 0.03  # four standard deviations


def test_teacher_is_always_right_without_a_carry() -> None:
    rng = np.random.default_rng(0)
    assert {addition.teacher_answer(12, 34, rng) for _ in range(50)} == {"46"}


def test_a_wordy_teacher_writes_dots_of_a_geometric_distribution() -> None:
    """For 55 the mean is 1.4^5 = 5.38, so that a share 1 / 6.38 has no dot, and (5.38 / 6.38)^20 = 3.3 % 20 or more."""
    rng = np.random.default_rng(0)
    answers = [addition.wordy_lesson({"question": "55+12="}, rng)[1]["content"] for _ in range(4000)]
    dots = np.array([answer.count(".") for answer in answers])
    assert {answer.rstrip(".") for answer in answers} == {"67"}
    assert abs(dots.mean() - 5.38) < 0.37  # four standard deviations, as below
    assert abs((dots == 0).mean() - 0.157) < 0.023
    assert abs((dots >= 20).mean() - 0.033) < 0.012


def test_dots_end_where_a_lesson_must() -> None:
    rng = np.random.default_rng(0)
    longest = max(len(addition.wordy_lesson({"question": "99+99="}, rng)[1]["content"]) for _ in range(2000))
    assert longest == addition.MOST_DOTS + 3
