"""The KL penalty as a part of the reward of every token, in place of a term of the loss.

    k_t = log(old policy / reference) of token t,   A_t = A + beta (mean of k over the step's tokens - k_t)

k is k1, and no gradient flows through it. Its mean is subtracted as a baseline, so that the penalty pushes no token
only for being in a batch that has moved (tinker-cookbook's ``incorporate_kl_penalty``, without its discount: a token
answers for its own k alone). The old policy is that of ``algorithm.old_policy``.

Suffixes: R training rows, S tokens of a row.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tpu_grpo.learner.loss import TrainBatch


def with_kl_in_advantages(batches: Sequence[TrainBatch], beta: float) -> list[TrainBatch]:
    """Add the penalty to the advantages of all micro-batches of a step; every host must call it."""
    sums = jax.device_get([_sums(batch.old_logps, batch.reference_logps, batch.weights) for batch in batches])
    tokens = math.fsum(float(count) for _, count in sums)
    mean = np.float32(math.fsum(float(total) for total, _ in sums) / max(tokens, 1.0))
    return [
        replace(
            batch,
            advantages=_penalized(
                batch.advantages, batch.old_logps, batch.reference_logps, batch.weights, np.float32(beta), mean
            ),
        )
        for batch in batches
    ]


@jax.jit
def _sums(
    old_RS: Float[Array, "R S"], reference_RS: Float[Array, "R S"], weights_RS: Float[Array, "R S"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    counts_RS = weights_RS != 0.0
    return jnp.where(counts_RS, old_RS - reference_RS, 0.0).sum(), counts_RS.sum(dtype=jnp.float32)


@jax.jit
def _penalized(
    advantages_RS: Float[Array, "R S"],
    old_RS: Float[Array, "R S"],
    reference_RS: Float[Array, "R S"],
    weights_RS: Float[Array, "R S"],
    beta: Float[Array, ""],
    mean: Float[Array, ""],
) -> Float[Array, "R S"]:
    penalty_RS = beta * (mean - (old_RS - reference_RS))
    return advantages_RS + jnp.where(weights_RS != 0.0, penalty_RS, 0.0)
