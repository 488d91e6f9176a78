"""From completions to packed rows: by hand, what is refused, token weights, and the packing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tpu_grpo.config import LossAggregation
from tpu_grpo.learner.rows import Packing, RowShape, pack, token_weights, train_rows, unpacked
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
    batch, packing = train_rows([[1, 2], [3], [9]], completions, advantages, SHAPE, "sequence-mean-token-mean")
    assert batch.rows.token_ids.tolist() == [[1, 2, 4, 5, 6, 0, 0, 0], [3, 7, 9, 9, 8, 0, 0, 0]]
    assert batch.rows.segments.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 2, 2, 0, 0, 0]]
    assert batch.rows.positions.tolist() == [[0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 0, 1, 0, 0, 0]]
    assert (1 * batch.rows.mask).tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0, 0, 0]]
    assert batch.rollout_logps[1].tolist() == [0, -0.25, -0.75, 0, -0.5, 0, 0, 0]
    assert batch.advantages[1].tolist() == [0, -0.5, -0.5, 0, 2, 0, 0, 0]
    np.testing.assert_allclose(batch.weights[0], np.array([0, 0, 1, 1, 1, 0, 0, 0]) / 9, rtol=1e-7)
    np.testing.assert_allclose(batch.weights[1], [0, 1 / 6, 1 / 6, 0, 1 / 3, 0, 0, 0], rtol=1e-7)
    assert {batch.rows.token_ids.dtype, batch.rows.segments.dtype, batch.rows.positions.dtype} == {np.dtype(np.int32)}
    assert {batch.rollout_logps.dtype, batch.advantages.dtype, batch.weights.dtype} == {np.dtype(np.float32)}
    taken = unpacked(batch.rollout_logps, packing, 3, 3)
    assert taken.tolist() == [[-0.5, -0.5, -0.5], [-0.25, -0.75, 0], [-0.5, 0, 0]]


def test_the_numbers_of_kept_tokens_lie_at_the_sampled_tokens() -> None:
    shape = replace(SHAPE, filtered=True)
    first, second = replace(completion([4, 5]), kept=np.array([7, 8])), replace(completion([6]), kept=np.array([9]))
    batch, _ = train_rows([[1, 2], [3]], [first, second], np.zeros(2), shape)
    assert batch.rows.kept.tolist() == [[0, 0, 7, 8, 0, 9, 0, 0]]
    assert next(batch.chunks(1)).rows.kept is not None
    for kept, found in ((None, "none"), (np.array([1, 2]), "2")):
        with pytest.raises(DataError, match=f"filtered_ratio=true needs .*: row 1 has 1 tokens and {found}; let the"):
            train_rows([[1, 2], [3]], [first, replace(second, kept=kept)], np.zeros(2), shape)
    assert train_rows([[1]], [first], np.zeros(1), SHAPE)[0].rows.kept is None


def test_chunks_are_consecutive() -> None:
    batch, _ = train_rows([[i + 1] * 4 for i in range(3)], [completion([5] * 3)] * 3, np.arange(3.0), SHAPE)
    first, second = batch.chunks(2)
    assert [first.rows.token_ids[:, 0].tolist(), second.rows.token_ids[:, 0].tolist()] == [[1, 2], [3]]
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
        ([1], replace(GOOD, logprobs=None), DataError, "row 1 has 2 tokens and none"),  # pyrefly: ignore[bad-argument-type]
        ([1], completion([4, 5], [-0.5, np.nan]), NonFiniteError, "token 1 in row 1 must be finite, got nan"),
        ([1], completion([4, 5], [-np.inf, 0]), NonFiniteError, "token 0 in row 1 must be finite, got -inf"),
    ],
)
def test_rows_that_cannot_be_learnt_from_are_refused(
    prompt: list[int], bad: Completion, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_rows([[1], prompt], [GOOD, bad], np.zeros(2), SHAPE)


# --- how much every token counts --------------------------------------------------------------------------------------


COUNTS = np.array([4, 1, 0, 2])
"""7 tokens in all; T = 4."""
BY_HAND = {
    "sequence-mean-token-mean": [1 / 12, 1 / 3, 0, 1 / 6],
    "token-mean": [1 / 7, 1 / 7, 0, 1 / 7],
    "sequence-mean-token-sum": [1 / 3, 1 / 3, 0, 1 / 3],
    "sequence-mean-token-scale": [1 / 12, 1 / 12, 0, 1 / 12],
    "prompt-mean-token-mean": [1 / 10, 1 / 10, 0, 1 / 4],
}
"""The first two completions are of one prompt, the others of another."""


@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
def test_weights_by_hand(aggregation: Any) -> None:
    np.testing.assert_allclose(token_weights(COUNTS, aggregation, 4, 2), BY_HAND[aggregation], rtol=1e-15)
    assert not token_weights(np.zeros(2, int), aggregation, 3).any()  # without any token nothing counts


def test_prompts_without_tokens_are_none_to_the_mean_over_prompts() -> None:
    found = token_weights(np.array([0, 0, 3, 1, 0, 1]), "prompt-mean-token-mean", 4, 2)
    np.testing.assert_allclose(found, [0, 0, 1 / 8, 1 / 8, 0, 1 / 2], rtol=1e-15)


def test_weighted_sums_are_the_means_that_they_are_named_after() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 8, 16)
    mask, losses = np.arange(8) < lengths[:, None], rng.normal(size=(16, 8))
    rows = [line[:length] for line, length in zip(losses, lengths, strict=True)]
    means: dict[Any, Any] = {
        "sequence-mean-token-mean": np.mean([row.mean() for row in rows]),
        "token-mean": np.concatenate(rows).mean(),
        "sequence-mean-token-sum": np.mean([row.sum() for row in rows]),
        "sequence-mean-token-scale": np.mean([row.sum() / 8 for row in rows]),
        "prompt-mean-token-mean": np.mean([np.concatenate(rows[start : start + 4]).mean() for start in (0, 4, 8, 12)]),
    }
    for aggregation, mean in means.items():
        weights = token_weights(lengths, aggregation, 8, 4)[:, None]
        assert (weights * mask * losses).sum() == pytest.approx(mean, rel=1e-12)


# --- packing ----------------------------------------------------------------------------------------------------------


def packed(lengths: Sequence[int], **settings: Any) -> Packing:
    sequences: Any = [range(length) for length in lengths]
    return pack(sequences, **settings)


def occupied(packing: Packing, lengths: list[int], row_tokens: int) -> np.ndarray:
    """How many sequences lie on each place of each row."""
    places = np.zeros((packing.count, row_tokens), int)
    for row, start, length in zip(packing.rows, packing.starts, lengths, strict=True):
        assert start + length <= row_tokens
        places[row, start : start + length] += 1
    return places


def test_by_hand() -> None:
    """5 and 3 fill a row of 8, so do 4, 2 and 2. Dealt by work alone, the last 2 would find no room."""
    found = packed([5, 3, 4, 2, 2], row_tokens=8, multiple=1)
    assert (found.count, found.rows.tolist()) == (2, [0, 0, 1, 1, 1])
    assert (found.starts.tolist(), found.segments.tolist()) == ([0, 5, 0, 4, 6], [1, 2, 1, 2, 3])


def test_rows_are_rounded_up_and_all_of_them_are_used() -> None:
    found = packed([4] * 6, row_tokens=8, multiple=4)  # three full rows would do
    assert found.count == 4
    assert sorted(np.bincount(found.rows).tolist()) == [1, 1, 2, 2]
    assert sorted(found.segments.tolist()) == [1, 1, 1, 1, 2, 2]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=80),
    row_tokens=st.integers(64, 200),
    multiple=st.integers(1, 7),
)
def test_sequences_do_not_overlap(lengths: list[int], row_tokens: int, multiple: int) -> None:
    found = packed(lengths, row_tokens=row_tokens, multiple=multiple)
    places = occupied(found, lengths, row_tokens)
    assert places.max() == 1
    assert places.sum() == sum(lengths)
    assert found.count % multiple == 0
    for row in range(found.count):  # segments are numbered as they lie
        mine = np.flatnonzero(found.rows == row)
        assert found.segments[mine].tolist() == list(range(1, len(mine) + 1))
        assert found.starts[mine].tolist() == [0, *np.cumsum(np.array(lengths)[mine])[:-1]][: len(mine)]
    again = packed(list(lengths), row_tokens=row_tokens, multiple=multiple)
    assert (found.rows.tolist(), found.starts.tolist()) == (again.rows.tolist(), again.starts.tolist())


def drawn_lengths() -> list[int]:
    """Log-normal completions of a rollout, with a mean of about a third of the longest, after 256 tokens of prompt."""
    rng = np.random.default_rng(0)
    answers = np.minimum(rng.lognormal(np.log(540), 0.7, 256), 2048).astype(int)
    return (256 + answers).tolist()


def test_rows_are_full() -> None:
    lengths = drawn_lengths()
    found = packed(lengths, row_tokens=2304, multiple=1)
    assert found.count * 2304 < 1.03 * sum(lengths)


def test_room_is_used_for_even_work() -> None:
    """In rows that are a quarter longer than they need to be, no row has a tenth more work than the mean."""
    lengths = drawn_lengths()
    found = packed(lengths, row_tokens=4608, multiple=64)
    work = np.zeros(found.count)
    np.add.at(work, found.rows, np.array(lengths) * (1 + np.array(lengths) / 4608))
    assert work.max() / work.mean() < 1.1
