"""Lengths and repetition are worked out by hand from the formulas of the papers."""

import math

import pytest

from tpu_grpo.rewards.shipped.lengths import cosine_length, length, overlong, repetition


def ids(*counts: int) -> list[list[int]]:
    return [[7] * n for n in counts]


def test_length():
    assert length(ids(0, 5, 10, 11), max_tokens=10, min_tokens=5) == [0.0, 1.0, 1.0, 0.0]
    assert length(ids(3, 12, 14, 99), max_tokens=10, min_tokens=5, margin=4) == [0.5, 0.5, 0.0, 0.0]


def test_overlong_is_dapo_s_penalty():
    # max 100, buffer 20: nothing up to 80, then (80 - n) / 20
    assert overlong(ids(10, 80, 85, 90, 100, 150), max_tokens=100, buffer=20) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="max_tokens must be >= 20, got 10"):
        overlong([], max_tokens=10, buffer=20)


def test_cosine_length():
    texts = ["#### 5"] * 4 + ["#### 6"] * 3 + ["#### 5"]
    found = cosine_length(texts, ids(0, 50, 100, 101, 0, 50, 100, 1), ["5"] * 7 + [None], max_tokens=100)
    assert found[:7] == pytest.approx([1.0, 0.75, 0.5, -1.0, -1.0, -0.75, -0.5])
    assert found[7] is None
    quarter = cosine_length(["5"], ids(25), ["5"], 100, verifier="exact_answer", correct=(2.0, 1.0))
    assert quarter == pytest.approx([1.0 + 0.5 * (1.0 + math.cos(math.pi / 4))])
    assert cosine_length([r"\boxed{1/2}"], ids(0), ["0.5"], 100, verifier="math") == [1.0]
    with pytest.raises(ValueError, match="verifier must be one of gsm8k, .*math, got 'x'"):
        cosine_length([], [], [], 10, verifier="x")


def test_repetition():
    # a b a b a b: aba bab aba bab -> 2 of 4 seen before
    assert repetition(["a b a b a b", "a b c d", "A a A a", "a b", ""]) == [-0.5, 0.0, -0.5, 0.0, 0.0]
    assert repetition(["a a a"], ngram=1, penalty=0.3) == pytest.approx([-0.2])
