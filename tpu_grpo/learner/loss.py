"""Tunix's GRPO loss, and how far the engine's log-probabilities are from the trainer's, from the same forward pass.

Suffixes: B rows, T completion tokens. With d = trainer - engine log-probability of a sampled token and the weight
w = exp(d), over the n tokens of a step (unbiased for tokens that the engine sampled without top-k, top-p or min-p):

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
from flax import nnx
from jaxtyping import Array, Bool, Float
from tunix.rl import algo_core, function_registry

from tpu_grpo.learner.repairs import observed_logps

LOSS_NAME = "tpu_grpo"
LOG_RATIO_LIMIT = 20.0
"""abs(d) is cut to this before exp, as in Tunix's own loss; float32 would overflow beyond 88."""


class AgreementSums(NamedTuple):
    """Sums over tokens, float32 scalars, that add up over micro-batches (``abs_max`` by its maximum)."""

    tokens: Any
    abs_sum: Any
    abs_max: Any
    excess_sum: Any
    """Of w - 1."""
    excess_square_sum: Any
    """Of (w - 1)^2."""
    kl_sum: Any
    """Of w - 1 - d."""


@function_registry.register_policy_loss_fn(LOSS_NAME)
def loss_with_agreement(
    model: nnx.Module, train_example: Any, algo_config: Any, pad_id: int, eos_id: int
) -> tuple[jax.Array, dict[str, Any]]:
    """``algo_core.grpo_loss_fn``, unchanged, with `AgreementSums` under "agreement" in its second result."""
    with observed_logps() as seen:
        loss, aux = algo_core.grpo_loss_fn(model, train_example, algo_config=algo_config, pad_id=pad_id, eos_id=eos_id)
    (trainer_logps,) = seen
    sums = agreement_sums(trainer_logps, train_example.rollout_per_token_logps, train_example.completion_mask)
    return loss, {**aux, "agreement": sums}


def agreement_sums(
    trainer_logps: Float[Array, "B T"], engine_logps: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> AgreementSums:
    """The sums of one micro-batch; no gradient flows through them."""
    difference = jax.lax.stop_gradient(trainer_logps.astype(jnp.float32)) - engine_logps
    difference = jnp.where(mask, difference, 0.0)
    limited = jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    excess = jnp.expm1(limited)
    return AgreementSums(
        tokens=mask.sum(dtype=jnp.float32),
        abs_sum=jnp.abs(difference).sum(),
        abs_max=jnp.abs(difference).max(),
        excess_sum=excess.sum(),
        excess_square_sum=jnp.square(excess).sum(),
        kl_sum=jnp.maximum(excess - limited, 0.0).sum(),  # negative only by rounding
    )


def agreement_metrics(sums: Sequence[AgreementSums]) -> dict[str, float]:
    """``agreement/*`` over the micro-batches of one pass over the step's tokens."""
    table = np.asarray(sums, np.float64)
    total = AgreementSums(*table.sum(axis=0))
    n = total.tokens
    weight_square_sum = n + 2 * total.excess_sum + total.excess_square_sum
    return {
        "agreement/logprob_abs_diff_max": float(AgreementSums(*table.max(axis=0)).abs_max),
        "agreement/logprob_abs_diff_mean": float(total.abs_sum / n),
        "agreement/ratio_mean": float(1 + total.excess_sum / n),
        "agreement/kl": float(total.kl_sum / n),
        "agreement/effective_sample_size": float(min(1.0, (n + total.excess_sum) ** 2 / (n * weight_square_sum))),
    }
