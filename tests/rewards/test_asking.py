"""Rows are split into batches by hand."""

from typing import Any

import pytest

from tpu_grpo.rewards.asking import split_rows
from tpu_grpo.rewards.reward_call import Call


@pytest.mark.parametrize(
    ("rows", "workers", "call", "expected"),
    [
        (range(4), 1, Call("f", "f"), [[0, 1, 2, 3]]),
        (range(8), 2, Call("f", "f"), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([0, 3, 4], 2, Call("f", "f"), [[0], [3], [4]]),
        (
            range(20),
            2,
            Call("f", "f"),
            [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]],
        ),
        (range(6), 1, Call("f", "f", concurrency=1), [[0, 1], [2, 3], [4, 5]]),
        (range(6), 0, Call("f", "f", concurrency=1, is_async=True), [[0, 1, 2, 3, 4, 5]]),
        (range(5), 2, Call("f", "f", concurrency=1, is_async=True), [[0, 1, 2], [3, 4]]),
        ([], 2, Call("f", "f"), []),
    ],
)
def test_rows_are_split_into_batches(rows: Any, workers: int, call: Call, expected: list[list[int]]):
    assert split_rows(rows, 2, workers, call) == expected
