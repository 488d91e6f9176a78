"""The loop of a launch, with a model whose next token is the last one plus one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_grpo.engine.decode_loop import (
    LaunchInputs,
    LaunchRows,
    Sampled,
    StepInputs,
    StepOutput,
    decode_loop,
    pack_rows,
    unpack_rows,
)
from tpu_grpo.engine.sampling import SamplingColumns


class Counting:
    """A decode step that writes each row's length into its slot, and samples token + 1 with log-probability -length."""

    def at_step(self, metadata: Any, seq_lens: Any) -> Any:
        return metadata

    def __call__(self, cache: list[jax.Array], inputs: StepInputs) -> tuple[StepOutput, list[jax.Array]]:
        np.testing.assert_array_equal(inputs.sampling.position, inputs.seq_lens)
        slots = jnp.where(inputs.out_cache_loc >= 0, inputs.out_cache_loc, len(cache[0]))
        written = cache[0].at[slots].set(inputs.seq_lens, mode="drop")
        return StepOutput(inputs.input_ids + 1, -inputs.seq_lens.astype(jnp.float32), None), [written]


def count_up(
    slots: list[list[int]],
    steps: int,
    left: int = 0,
    stop: frozenset[int] = frozenset(),
    before: list[list[int]] | None = None,
    what_follows: bool = False,
) -> Any:
    """Rows start with tokens 10, 20, ..., of lengths 5, 6, ...; the last row takes no stop token for an end."""
    rows = len(slots)
    columns = SamplingColumns(
        *(np.ones(rows, dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)),
        key=np.ones((rows, 4), np.uint32),
        position=np.zeros(rows, np.int32),
    )
    lengths = np.arange(5, 5 + rows, dtype=np.int32)
    given = LaunchRows(10 * np.arange(1, rows + 1, dtype=np.int32), lengths, np.arange(rows) < rows - 1, columns, None)
    packed = pack_rows(given._replace(slots=np.array(slots, np.int32)))
    control = jnp.array([steps, left, before is not None])
    given_before = jnp.array([[99] * rows, [1] * rows] if before is None else before)
    model: Any = Counting()
    with jax.disable_jit():
        output, cache = decode_loop(
            model,
            [jnp.zeros(12, jnp.int32)],
            LaunchInputs(jnp.asarray(packed), control, None, given_before),
            attention=model,
            stop_token_ids=stop,
            experts=None,
        )
    if what_follows:
        return np.asarray(output.after)
    found = Sampled.of_launch(output, np.arange(rows))
    return (
        [column[:n].tolist() for column, n in zip(found.tokens.T, found.count, strict=True)],
        [column[:n].tolist() for column, n in zip(found.logprobs.T, found.count, strict=True)],
        cache[0].tolist(),
    )


@pytest.mark.full
def test_rows_end_with_their_slots_and_by_stop_tokens() -> None:
    slots = [[0, 1, 2, 3], [4, 5, -1, -1], [6, 7, 8, -1], [-1, -1, -1, -1]]
    found, logprobs, cache = count_up(slots, steps=4, stop=frozenset({13, 31}))
    assert found == [[11, 12, 13], [21, 22], [31], []]
    assert logprobs == [[-5, -6, -7], [-6, -7], [-7], []]
    assert cache == [5, 6, 7, 0, 6, 7, 7, 0, 0, 0, 0, 0]
    found, _, cache = count_up(slots[:3], steps=4, stop=frozenset({31}))
    assert found == [[11, 12, 13, 14], [21, 22], [31, 32, 33]]  # the last row does not stop
    assert cache == [5, 6, 7, 8, 6, 7, 7, 8, 9, 0, 0, 0]


@pytest.mark.full
@pytest.mark.parametrize(("steps", "left", "counts"), [(4, 0, [4, 2, 1]), (3, 0, [3, 2, 1]), (4, 1, [2, 2, 1])])
def test_a_launch_ends_after_its_steps_or_with_few_rows(steps: int, left: int, counts: list[int]) -> None:
    found, _, _ = count_up([[0, 1, 2, 3], [4, 5, -1, -1], [6, -1, -1, -1]], steps, left)
    assert [len(row) for row in found] == counts


@pytest.mark.full
def test_a_launch_takes_up_the_rows_that_go_on() -> None:
    """The second has stopped in the launch before, the third has no more slots; 2 rows are no more than 2."""
    slots = [[0, 1], [2, 3], [-1, -1], [4, 5]]
    before = [[70, 80, 90, 60], [0, 1, 0, 0]]
    found, logprobs, cache = count_up(slots, steps=2, before=before)
    assert found == [[71, 72], [], [], [61, 62]]
    assert logprobs == [[-5, -6], [], [], [-8, -9]]
    assert cache == [5, 6, 0, 0, 8, 9, 0, 0, 0, 0, 0, 0]
    assert count_up(slots, steps=2, left=2, before=before)[0] == [[], [], [], []]


def test_a_launch_says_what_the_next_needs() -> None:
    """The first row ends by its slots, the second by a stop token, and the third goes on."""
    slots = [[0, 1, -1], [4, 5, 6], [7, 8, 9], [-1, -1, -1]]
    after = count_up(slots, steps=3, stop=frozenset({22}), what_follows=True)
    assert after[1].tolist() == [0, 1, 0, 0]
    assert after[0, 2] == 33


def test_rows_survive_being_packed() -> None:
    rng = np.random.default_rng(0)
    given = LaunchRows(
        rng.integers(0, 9, 3).astype(np.int32),
        np.array([5, 0, 7], np.int32),
        np.array([True, False, True]),
        SamplingColumns(
            temperature=rng.random(3).astype(np.float32),
            top_k=np.array([0, 5, 2**31 - 1], np.int32),
            top_p=rng.random(3).astype(np.float32),
            min_p=rng.random(3).astype(np.float32),
            key=rng.integers(0, 2**32, (3, 4), np.uint32),
            position=np.array([5, 0, 7], np.int32),
        ),
        rng.integers(-1, 99, (3, 4)).astype(np.int32),
    )
    for before, after in zip(
        jax.tree.leaves(given), jax.tree.leaves(unpack_rows(jnp.asarray(pack_rows(given)))), strict=True
    ):
        np.testing.assert_array_equal(after, before)
        assert after.dtype == before.dtype
