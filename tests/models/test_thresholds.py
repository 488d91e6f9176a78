"""The largest logits of a row, against a sort."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_grpo.models.thresholds import largest

LARGEST = jax.jit(largest)


def kept(rows: Any, counts: Any) -> np.ndarray:
    rows = jnp.asarray(rows, jnp.float32)
    return np.asarray(rows > LARGEST(rows, jnp.asarray(counts, jnp.int32))[:, None])


def test_by_hand() -> None:
    found = LARGEST(jnp.array([[3.0, 1.0, 2.0]] * 4), jnp.array([1, 2, 3, 9]))
    assert found.tolist() == [2.5, 1.5, -np.inf, -np.inf]
    assert kept([[5.0, 5.0, 4.0]], [1]).tolist() == [[True, True, False]]  # ties of the last


def test_numbers_of_every_size_and_neighbours() -> None:
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(20, 300)), rng.normal(size=(20, 300)) * 10.0 ** rng.integers(-30, 30, 300)])
    rows = rows.astype(np.float32)
    one = np.float32(1.0)
    rows[0, :3] = 9 + one, np.nextafter(9 + one, np.float32(np.inf)), np.nextafter(9 + one, np.float32(0))
    counts = np.concatenate([[2], rng.integers(1, 301, 39)])
    places = np.argsort(np.argsort(-rows, axis=1, kind="stable"), axis=1)
    np.testing.assert_array_equal(kept(rows, counts), places < counts[:, None])
