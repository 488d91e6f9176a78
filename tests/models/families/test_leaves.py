"""What a transform does to each head."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_grpo.models.families.leaves import InputsFirst, flatten, flatten_kv, repeat_kv, same, transpose

HEADS, WIDTH, HIDDEN = 2, 3, 5


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_copies_of_a_head_stand_side_by_side(copies: int) -> None:
    weight = np.arange(HIDDEN * HEADS * WIDTH, dtype=np.float32).reshape(HIDDEN, HEADS, WIDTH)
    bias = np.arange(HEADS * WIDTH, dtype=np.float32)
    columns = HEADS * copies * WIDTH
    flat_weight = np.asarray(flatten_kv(jnp.asarray(weight), (HIDDEN, columns)))
    flat_bias = np.asarray(repeat_kv(WIDTH)(jnp.asarray(bias), (columns,)))
    for head in range(HEADS * copies):
        place, original = slice(head * WIDTH, (head + 1) * WIDTH), head // copies
        np.testing.assert_array_equal(flat_weight[:, place], weight[:, original])
        np.testing.assert_array_equal(flat_bias[place], bias[original * WIDTH : (original + 1) * WIDTH])


def test_the_other_transforms() -> None:
    matrix = jnp.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert same(matrix, (2, 3)) is matrix
    np.testing.assert_array_equal(transpose(matrix, (3, 2)), [[1, 4], [2, 5], [3, 6]])
    np.testing.assert_array_equal(flatten(matrix.reshape(2, 3, 1), (2, 3)), matrix)


@pytest.mark.parametrize("copies", [1, 3])
def test_inputs_come_first_and_copies_stand_side_by_side(copies: int) -> None:
    stacked = np.arange(2 * HEADS * HIDDEN * WIDTH, dtype=np.float32).reshape(2, HEADS, HIDDEN, WIDTH)
    columns = HEADS * copies * WIDTH
    for part in range(2):
        flat = np.asarray(InputsFirst(part)(jnp.asarray(stacked), (HIDDEN, columns)))
        alone = np.asarray(InputsFirst()(jnp.asarray(stacked[part]), (HIDDEN, columns)))
        np.testing.assert_array_equal(flat, alone)
        for head in range(HEADS * copies):
            place = slice(head * WIDTH, (head + 1) * WIDTH)
            np.testing.assert_array_equal(flat[:, place], stacked[part, head // copies])
    assert InputsFirst(1) == InputsFirst(1) != InputsFirst(0)  # equal layers share a program
