"""Matrices in 8 bits: by hand, and that rounding them has no bias."""

import jax.numpy as jnp
import numpy as np

from tpu_grpo.models.families.leaves import same
from tpu_grpo.weights.plan import QUANTIZED, SCALE, Quantized


def rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weights [outputs, inputs] and the scales [outputs]."""
    parts = (Quantized(same, matrix.shape, part) for part in (QUANTIZED, SCALE))
    weights, scales = (np.asarray(part(jnp.asarray(matrix, jnp.float32), ())) for part in parts)
    return weights, scales


def test_each_output_has_a_scale_and_halves_go_to_even_numbers() -> None:
    """Scales 1, 2 and 0: the columns 127 .5 1.5 -2.5, -254 1 3 -5, and zeros."""
    matrix = np.array([[127, 0.5, 1.5, -2.5], [-254, 1, 3, -5], [0, 0, 0, 0]]).T
    weights, scales = rounded(matrix)
    assert weights.tolist() == [[127, 0, 2, -2], [-127, 0, 2, -2], [0, 0, 0, 0]]
    assert scales.tolist() == [1, 2, 0]
    assert (weights.dtype, scales.dtype) == (np.int8, np.float32)


def test_rounding_has_no_bias_and_the_error_of_half_a_step() -> None:
    """Errors are uniform in a step: their mean is 0, within four standard errors, and their deviation step / sqrt(12).

    Truncation towards zero would make magnitudes half a step too small.
    """
    matrix = np.random.default_rng(0).normal(size=(4096, 64))
    weights, scales = rounded(matrix)
    errors = weights.T - matrix / scales  # in steps
    deviation = 1 / np.sqrt(12)
    assert abs(errors.mean()) < 4 * deviation / np.sqrt(errors.size)
    assert abs((errors * np.sign(matrix)).mean()) < 0.005
    np.testing.assert_allclose(errors.std(), deviation, rtol=0.01)
