"""Packing: nothing is lost or laid over another, hosts agree, rows are filled and their work is even."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from tpu_grpo.learner.rows import Packing, pack


def packed(lengths: Sequence[int], **settings: int) -> Packing:
    return pack([range(length) for length in lengths], **settings)


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
