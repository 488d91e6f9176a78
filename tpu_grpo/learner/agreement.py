"""How far the engine's log-probabilities are from the trainer's, measured in the forward pass of the update.

Suffixes: R packed rows, S tokens of a row. With d = trainer - engine log-probability of a sampled token and the weight
w = exp(d), over the n tokens of a step's first update (unbiased for tokens that the engine sampled without top-k,
top-p or min-p):

    logprob_abs_diff_max, _mean   of abs(d)
    ratio_mean                    of w; 1 in expectation
    kl                            mean of w - 1 - d, the k3 estimate of KL(engine || trainer)
                                  (http://joschu.net/blog/kl-approx.html); never negative
    effective_sample_size         (sum w)^2 / (n sum w^2), in (0, 1]: the share of the tokens that still count if the
                                  engine's samples are weighted to stand for the trainer's

Sums are kept of w - 1, not of w: near agreement w is 1 but for the last bits, and those are the measurement.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

LOG_RATIO_LIMIT = 20.0
"""abs(d) is cut to this before exp, as the loss does; float32 would overflow beyond 88."""


class AgreementSums(NamedTuple):
    """Sums over tokens, float32 scalars, that add up over micro-batches (``abs_max`` by its maximum)."""

    tokens: Any
    abs_sum: Any
    abs_max: Any
    excess_sum: Any
    """The sum of w - 1."""
    excess_square_sum: Any
    """The sum of (w - 1)^2."""
    kl_sum: Any
    """The sum of w - 1 - d."""


def agreement_sums(
    trainer_logps_RS: Float[Array, "R S"], engine_logps_RS: Float[Array, "R S"], mask_RS: Bool[Array, "R S"]
) -> AgreementSums:
    """Add up one micro-batch; no gradient flows through the sums."""
    difference_RS = jax.lax.stop_gradient(trainer_logps_RS.astype(jnp.float32)) - engine_logps_RS
    difference_RS = jnp.where(mask_RS, difference_RS, 0.0)
    limited_RS = jnp.clip(difference_RS, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    excess_RS = jnp.expm1(limited_RS)
    return AgreementSums(
        tokens=mask_RS.sum(dtype=jnp.float32),
        abs_sum=jnp.abs(difference_RS).sum(),
        abs_max=jnp.abs(difference_RS).max(),
        excess_sum=excess_RS.sum(),
        excess_square_sum=jnp.square(excess_RS).sum(),
        kl_sum=jnp.maximum(excess_RS - limited_RS, 0.0).sum(),  # negative only by rounding
    )


def agreement_metrics(sums: Sequence[AgreementSums]) -> dict[str, float]:
    """Compute ``agreement/*`` over the micro-batches of one pass over the step's tokens."""
    table = np.asarray(sums, np.float64)
    total = AgreementSums(*table.sum(axis=0))
    n = total.tokens
    weight_square_sum = n + 2 * total.excess_sum + total.excess_square_sum
    return {
        "agreement/logprob_abs_diff_max": float(AgreementSums(*table.max(axis=0)).abs_max),
        "agreement/logprob_abs_diff_mean": float(total.abs_sum / n),
        "agreement/ratio_mean": float(1 + total.excess_sum / n),
        "agreement/kl": float(total.kl_sum / n),
        "agreement/effective_sample_size": float(
            np.minimum(1.0, (n + total.excess_sum) ** 2 / (n * weight_square_sum))
        ),
    }
