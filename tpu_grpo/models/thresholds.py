"""Finds a threshold that only a row's largest logits exceed, by a 16-ary search instead of a sort.

Float32 numbers are mapped to integers in the same order, their ranks, so that a range of thresholds can be divided
evenly. One pass over a row tries 15 thresholds and narrows the range to a 16th. (XLA for TPUs would take a minute to
compile a sort.) The filters in tpu_grpo/engine/sampling.py and tpu_grpo/learner/output_head.py use this module.

Array suffixes: B rows, V vocabulary, N thresholds that one pass tries.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TRIALS = 15
"""How many ranks one pass over the vocabulary tries. A pass narrows the range to a 16th, so that eight passes find one
of 2^32 ranks. XLA for TPUs computes the 15 sums in one fusion, in less than twice the time of one sum."""
DENORMALS = 0x7FFFFF
"""The number of positive float32 numbers below the smallest normal one."""
LARGEST_RANK = 0x7F800000 - DENORMALS
"""The rank of infinity."""
NO_RANK = -LARGEST_RANK - 1
"""A rank below that of minus infinity, so that every logit's rank is higher."""
PASSES = 9
"""The number of passes; eight are enough to find one of 2^32 ranks."""


def largest(
    logits_BV: Float[Array, "B V"],
    count_B: Int[Array, " B"],
    total: Callable[[Array], Array] = lambda value: value,
    maximum: Callable[[Array], Array] = lambda value: value,
) -> Float[Array, " B"]:
    """Find a threshold per row. The ``count_B`` largest logits exceed it, and so do logits that equal one of these.

    The threshold is halfway between the lowest logit above it and the highest below. A logit recomputed with other
    rounding then falls on the same side. If no logit is below, the threshold is minus infinity. For [3 1 2] and count 2
    it is 1.5.

    Args:
        logits_BV: finite float32 numbers, of the whole vocabulary or of one device's part.
        count_B: at least 1.
        total: sums a value over all parts of the vocabulary.
        maximum: takes the maximum of a value over all parts.
    """
    high_B = ranks(maximum(jnp.max(logits_BV, axis=-1)))
    low_B = jnp.full_like(high_B, NO_RANK)

    def narrow(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_B, high_B = bounds
        trial_BN = trials(low_B, high_B)
        value_BN = values(trial_BN)
        above = [jnp.sum(logits_BV > value_BN[:, n, None], axis=-1, dtype=jnp.int32) for n in range(TRIALS)]
        enough_BN = total(jnp.stack(above, axis=-1)) >= count_B[:, None]
        low_next_B = jnp.max(jnp.where(enough_BN, trial_BN, low_B[:, None]), axis=-1)
        return low_next_B, jnp.min(jnp.where(enough_BN, high_B[:, None], trial_BN), axis=-1)

    low_B, _ = jax.lax.fori_loop(0, PASSES, narrow, (low_B, high_B))
    kept_BV = logits_BV > values(low_B)[:, None]
    lowest_B = -maximum(jnp.max(jnp.where(kept_BV, -logits_BV, -jnp.inf), axis=-1))
    highest_B = maximum(jnp.max(jnp.where(kept_BV, -jnp.inf, logits_BV), axis=-1))
    halfway_B = 0.5 * lowest_B + 0.5 * highest_B
    return jnp.where(halfway_B < lowest_B, halfway_B, highest_B)  # halfway may be rounded up to the lowest


def ranks(numbers: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Map float32 numbers to integers of the same order; adjacent numbers get adjacent integers.

    Zeros and denormal numbers map to 0, because TPUs and XLA's CPU backend compare denormal numbers as zeros.
    """
    bits = jax.lax.bitcast_convert_type(numbers, jnp.int32)
    size = jnp.maximum((bits & 0x7FFFFFFF) - DENORMALS, 0)
    return jnp.where(bits < 0, -size, size)


def values(numbers: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Map ranks back to their float32 numbers; ranks below that of -inf become -inf."""
    size = jnp.where(numbers == 0, 0, jnp.minimum(jnp.abs(numbers), LARGEST_RANK) + DENORMALS)
    return jnp.copysign(jax.lax.bitcast_convert_type(size, jnp.float32), numbers.astype(jnp.float32))


def trials(low_B: Int[Array, " B"], high_B: Int[Array, " B"]) -> Int[Array, "B N"]:
    """Return ``TRIALS`` ranks spaced evenly over [low, high); if high <= low, all are ``low``."""
    width_B1 = jnp.where(low_B < high_B, high_B - low_B, 0).astype(jnp.uint32)[:, None]
    parts, part_N = TRIALS + 1, jnp.arange(1, TRIALS + 1, dtype=jnp.uint32)
    # width * part / parts, rounded down, without overflow
    offset_BN = width_B1 // parts * part_N + width_B1 % parts * part_N // parts
    return low_B[:, None] + offset_BN.astype(jnp.int32)
