"""Rows of Tunix's own loop: padding by hand, and what is refused."""

import numpy as np
import pytest

from tests.learner.test_rows import GOOD, completion
from tpu_grpo.records.errors import DataError, NonFiniteError
from tpu_grpo.records.stages import Completion
from tpu_grpo.tunix_loop.padded import PaddedShape, padded_rows

SHAPE = PaddedShape(prompt_tokens=4, completion_tokens=3, pad_id=9)


def test_rows_are_padded_and_masked_by_length() -> None:
    # Row 1 ends with the pad token, sampled as a stop token: it is a token of the row all the same.
    completions = [completion([4, 5, 6]), completion([7, 9])]
    rows = padded_rows([[1, 2], [3]], completions, np.array([0.5, -0.5]), SHAPE, "token-mean")
    assert rows.prompt_ids.tolist() == [[9, 9, 1, 2], [9, 9, 9, 3]]
    assert rows.prompt_mask.tolist() == [[False, False, True, True], [False, False, False, True]]
    assert rows.completion_ids.tolist() == [[4, 5, 6], [7, 9, 9]]
    assert rows.completion_mask.tolist() == [[True, True, True], [True, True, False]]
    assert rows.rollout_logps.tolist() == [[-0.5, -0.5, -0.5], [-0.5, -0.5, 0.0]]
    assert rows.advantages.tolist() == [0.5, -0.5]
    assert {rows.prompt_ids.dtype, rows.completion_ids.dtype} == {np.dtype(np.int32)}
    assert {rows.rollout_logps.dtype, rows.advantages.dtype} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("prompt", "bad", "error", "message"),
    [
        ([1, 9, 2], GOOD, DataError, "pad token 9, found in row 1.*another pad token"),
        ([1] * 5, GOOD, DataError, "max_prompt_tokens=4 tokens, got 5 in row 1"),
        ([1], completion([4] * 4), DataError, "max_new_tokens=3 tokens, got 4 in row 1"),
        ([1], completion([4, 9, 5]), DataError, "found before the end of row 1; make it a stop"),
        ([1], completion([4, 5], [-0.5]), DataError, "row 1 has 2 tokens and 1; let the engine"),
        ([1], completion([4, 5], [-0.5, np.nan]), NonFiniteError, "token 1 in row 1 must be finite, got nan"),
    ],
)
def test_rows_that_cannot_be_learnt_from_are_refused(
    prompt: list[int], bad: Completion, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        padded_rows([[1], prompt], [GOOD, bad], np.zeros(2), SHAPE, "token-mean")
