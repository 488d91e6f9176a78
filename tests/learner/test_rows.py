from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from tpu_grpo.algorithms import Algorithm, open_algorithm
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.errors import DataError, NonFiniteError, RewardError
from tpu_grpo.learner.rows import RowShape, group_advantages, train_rows
from tpu_grpo.types import Completion

SHAPE = RowShape(prompt_tokens=4, completion_tokens=3, pad_id=9)


def completion(ids: list[int], logprobs: list[float] | None = None) -> Completion:
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    return Completion(np.array(ids, np.int32), np.array(values, np.float32), "stop", 0)


def test_rows_are_padded_and_masked_by_length() -> None:
    # Row 1 ends with the pad token, sampled as a stop token: it is a token of the row all the same.
    rows = train_rows([[1, 2], [3]], [completion([4, 5, 6]), completion([7, 9])], np.array([0.5, -0.5]), SHAPE)
    assert rows.prompt_ids.tolist() == [[9, 9, 1, 2], [9, 9, 9, 3]]
    assert rows.prompt_mask.tolist() == [[False, False, True, True], [False, False, False, True]]
    assert rows.completion_ids.tolist() == [[4, 5, 6], [7, 9, 9]]
    assert rows.completion_mask.tolist() == [[True, True, True], [True, True, False]]
    assert rows.rollout_logps.tolist() == [[-0.5, -0.5, -0.5], [-0.5, -0.5, 0.0]]
    assert rows.advantages.tolist() == [0.5, -0.5]
    assert {rows.prompt_ids.dtype, rows.completion_ids.dtype} == {np.dtype(np.int32)}
    assert {rows.rollout_logps.dtype, rows.advantages.dtype} == {np.dtype(np.float32)}


def test_chunks_are_consecutive() -> None:
    rows = train_rows([[i + 1] for i in range(4)], [completion([5])] * 4, np.arange(4.0), SHAPE)
    assert [chunk.advantages.tolist() for chunk in rows.chunks(2)] == [[0, 1], [2, 3]]
    assert [chunk.prompt_ids[:, -1].tolist() for chunk in rows.chunks(2)] == [[1, 2], [3, 4]]


GOOD = completion([4, 5])


@pytest.mark.parametrize(
    ("prompt", "bad", "error", "message"),
    [
        ([1, 9, 2], GOOD, DataError, "pad token 9, found in row 1.*another pad token"),
        ([1] * 5, GOOD, DataError, "max_prompt_tokens=4 tokens, got 5 in row 1"),
        ([], GOOD, DataError, "got 0 in row 1"),
        ([1], completion([4] * 4), DataError, "max_new_tokens=3 tokens, got 4 in row 1"),
        ([1], completion([]), DataError, "got 0 in row 1"),
        ([1], completion([4, 9, 5]), DataError, "found before the end of row 1; make it a stop token"),
        ([1], completion([4, 5], [-0.5]), DataError, "row 1 has 2 tokens and 1; let the engine"),
        ([1], replace(GOOD, logprobs=None), DataError, "row 1 has 2 tokens and none"),
        ([1], completion([4, 5], [-0.5, np.nan]), NonFiniteError, "token 1 in row 1 must be finite, got nan"),
        ([1], completion([4, 5], [-np.inf, 0]), NonFiniteError, "token 0 in row 1 must be finite, got -inf"),
    ],
)
def test_rows_that_cannot_be_learnt_from_are_refused(
    prompt: list[int], bad: Completion, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_rows([[1], prompt], [GOOD, bad], np.zeros(2), SHAPE)


def opened(estimator: Any) -> Algorithm:
    return open_algorithm(AlgorithmSection(advantage=estimator))


def test_advantages_by_hand() -> None:
    rewards = np.array([1.0, 2.0, 6.0, 5.0, 5.0, 5.0])
    # First group: mean 3, deviations -2 -1 3, variance (4 + 1 + 9) / 2 = 7.
    std = np.sqrt(7.0) + 1e-6
    by_hand = {
        "drgrpo": [-2, -1, 3, 0, 0, 0],
        "grpo": [-2 / std, -1 / std, 3 / std, 0, 0, 0],
        "rloo": [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0],  # the means of the others: 4, 3.5, 1.5
    }
    for estimator, expected in by_hand.items():
        found = group_advantages(rewards, group_size=3, algorithm=opened(estimator))
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, atol=1e-15)


@settings(max_examples=50, deadline=None)
@given(
    rewards=arrays(np.float64, (5, 4), elements=st.floats(-10, 10)),
    estimator=st.sampled_from(["grpo", "rloo", "drgrpo"]),
    seed=st.integers(0, 1000),
)
def test_groups_sum_to_zero_and_do_not_see_each_other(rewards: np.ndarray, estimator: str, seed: int) -> None:
    found = group_advantages(rewards.ravel(), group_size=4, algorithm=opened(estimator)).reshape(5, 4)
    np.testing.assert_allclose(found.sum(axis=1), 0.0, atol=1e-6)
    order = np.random.default_rng(seed).permutation(5)
    permuted = group_advantages(rewards[order].ravel(), group_size=4, algorithm=opened(estimator)).reshape(5, 4)
    np.testing.assert_allclose(permuted, found[order], atol=1e-12)


def test_rewards_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(RewardError, match="got nan in row 2"):
        group_advantages(np.array([0, 1, np.nan, 0]), group_size=2, algorithm=opened("grpo"))
    with pytest.raises(RewardError, match="group_size=2, got 3"):
        group_advantages(np.zeros(3), group_size=2, algorithm=opened("grpo"))
