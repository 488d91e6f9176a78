from dataclasses import replace

import numpy as np
import pytest

from tpu_grpo.learner.rows import RowShape, train_rows, unpacked
from tpu_grpo.records.errors import DataError, NonFiniteError
from tpu_grpo.records.stages import Completion

SHAPE = RowShape(max_prompt_tokens=4, max_new_tokens=3, tokens=8, micro_batch=1)


def completion(ids: list[int], logprobs: list[float] | None = None) -> Completion:
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    return Completion(np.array(ids, np.int32), np.array(values, np.float32), "stop", 0)


def test_rows_by_hand() -> None:
    """Of 5, 3 and 2 tokens, the longest stands alone and the others together, so that rows have equal work."""
    completions = [completion([4, 5, 6]), completion([7, 9], [-0.25, -0.75]), completion([8])]
    advantages = np.array([0.5, -0.5, 2.0])
    rows, packing = train_rows([[1, 2], [3], [9]], completions, advantages, SHAPE, "sequence-mean-token-mean")
    assert rows.token_ids.tolist() == [[1, 2, 4, 5, 6, 0, 0, 0], [3, 7, 9, 9, 8, 0, 0, 0]]
    assert rows.segments.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 2, 2, 0, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 0, 1, 0, 0, 0]]
    assert (1 * rows.mask).tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0, 0, 0]]
    assert rows.rollout_logps[1].tolist() == [0, -0.25, -0.75, 0, -0.5, 0, 0, 0]
    assert rows.advantages[1].tolist() == [0, -0.5, -0.5, 0, 2, 0, 0, 0]
    np.testing.assert_allclose(rows.weights[0], np.array([0, 0, 1, 1, 1, 0, 0, 0]) / 9, rtol=1e-7)
    np.testing.assert_allclose(rows.weights[1], [0, 1 / 6, 1 / 6, 0, 1 / 3, 0, 0, 0], rtol=1e-7)
    assert {rows.token_ids.dtype, rows.segments.dtype, rows.positions.dtype} == {np.dtype(np.int32)}
    assert {rows.rollout_logps.dtype, rows.advantages.dtype, rows.weights.dtype} == {np.dtype(np.float32)}
    taken = unpacked(rows.rollout_logps, packing, 3, 3)
    assert taken.tolist() == [[-0.5, -0.5, -0.5], [-0.25, -0.75, 0], [-0.5, 0, 0]]


def test_the_numbers_of_kept_tokens_lie_at_the_sampled_tokens() -> None:
    shape = replace(SHAPE, filtered=True)
    first, second = replace(completion([4, 5]), kept=np.array([7, 8])), replace(completion([6]), kept=np.array([9]))
    rows, _ = train_rows([[1, 2], [3]], [first, second], np.zeros(2), shape)
    assert rows.kept is not None
    assert rows.kept.tolist() == [[0, 0, 7, 8, 0, 9, 0, 0]]
    assert next(rows.chunks(1)).kept is not None
    for kept, found in ((None, "none"), (np.array([1, 2]), "2")):
        with pytest.raises(DataError, match=f"filtered_ratio=true needs .*: row 1 has 1 tokens and {found}; let the"):
            train_rows([[1, 2], [3]], [first, replace(second, kept=kept)], np.zeros(2), shape)
    assert train_rows([[1]], [first], np.zeros(1), SHAPE)[0].kept is None


def test_chunks_are_consecutive() -> None:
    rows, _ = train_rows([[i + 1] * 4 for i in range(3)], [completion([5] * 3)] * 3, np.arange(3.0), SHAPE)
    first, second = rows.chunks(2)
    assert [first.token_ids[:, 0].tolist(), second.token_ids[:, 0].tolist()] == [[1, 2], [3]]
    assert first.advantages.shape == (2, 8)


GOOD = completion([4, 5])


@pytest.mark.parametrize(
    ("prompt", "bad", "error", "message"),
    [
        ([1] * 5, GOOD, DataError, "max_prompt_tokens=4 tokens, got 5 in row 1"),
        ([], GOOD, DataError, "got 0 in row 1"),
        ([1], completion([4] * 4), DataError, "max_new_tokens=3 tokens, got 4 in row 1"),
        ([1], completion([]), DataError, "got 0 in row 1"),
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
