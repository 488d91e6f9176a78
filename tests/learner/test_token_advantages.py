"""Advantages of single tokens, from what scores say of them to the rows that are trained on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tpu_grpo.config import RunConfig
from tpu_grpo.learner.rows import RowShape, train_rows
from tpu_grpo.learner.token_advantages import token_advantages
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import Completion, Prompt, PromptBatch, Rollout, ScoredRollout, Scores

PROMPTS = [[1, 2], [1, 2], [3], [3]]
LENGTHS = (3, 2, 1, 2)
ADVANTAGES = np.array([0.5, -0.5, 1.0, -1.0])
PER_TOKEN = tuple(map(np.array, ([0.0, 0.25, -1.0], [0.0, 0.5], [2.0], [0.0, 0.0])))


def scored(per_token: Any) -> ScoredRollout:
    completions = tuple(Completion(np.arange(4, 4 + n), np.full(n, -0.5, np.float32), "stop", 0) for n in LENGTHS)
    batch = PromptBatch(1, (Prompt("", (1, 2)), Prompt("", (3,))))
    rollout = Rollout(batch, 2, completions, ("",) * 4, 0.0)
    return ScoredRollout(rollout, Scores(np.zeros(4), {}, 0.0, per_token=per_token))


def test_by_hand() -> None:
    found = token_advantages(ADVANTAGES, scored(PER_TOKEN), RunConfig())
    assert [line.tolist() for line in found] == [[0.5, 0.75, -0.5], [-0.5, 0.0], [3.0], [-1.0, -1.0]]
    assert token_advantages(ADVANTAGES, scored(()), RunConfig()) is ADVANTAGES


def test_rows_hold_them_and_mini_batches_take_their_own() -> None:
    for chosen in ([0, 1], [1]):
        part = scored(PER_TOKEN).select(chosen)
        rows_B = scored(PER_TOKEN).rollout.rows_of(chosen)
        found = token_advantages(ADVANTAGES[rows_B], part, RunConfig())
        prompts = [PROMPTS[row] for row in rows_B]
        rows, packing = train_rows(prompts, part.rollout.completions, found, RowShape(2, 3, 8, 1))
        for place, row in enumerate(rows_B):
            start = packing.starts[place] + len(PROMPTS[row])
            held = rows.advantages[packing.rows[place], start : start + LENGTHS[row]]
            np.testing.assert_allclose(held, ADVANTAGES[row] + PER_TOKEN[row], rtol=1e-6)
        assert not rows.advantages[~rows.mask].any()


@pytest.mark.parametrize(
    ("row", "values", "message"),
    [
        (1, np.zeros(3), r"got the shape \(3,\) for the 2 tokens of row 1; the stop token counts"),
        (2, np.array([np.nan]), r"must be finite, got \[nan\] in row 2; return numbers"),
    ],
)
def test_what_does_not_fit_is_refused(row: int, values: Any, message: str) -> None:
    per_token = tuple(values if index == row else line for index, line in enumerate(PER_TOKEN))
    with pytest.raises(RewardError, match=message):
        token_advantages(ADVANTAGES, scored(per_token), RunConfig())
    short = replace(scored(PER_TOKEN), scores=replace(scored(PER_TOKEN).scores, per_token=PER_TOKEN[:3]))
    with pytest.raises(RewardError, match="for every completion, got 3 for 4; give zeros"):
        token_advantages(ADVANTAGES, short, RunConfig())
