"""The loss of a micro-batch: the algorithm's token losses, and what all algorithms have in common around them.

    log-probabilities -> algorithm.token_losses -> x importance weights -> mean over tokens and rows -> + beta x KL

Tunix's functions run the model and do the reductions, so results can be compared with Tunix's bit for bit.

Suffixes: B rows, T completion tokens, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from tunix.rl import algo_core, common, function_registry

from tpu_grpo.learner.agreement import agreement_sums
from tpu_grpo.learner.routing import split_replaying

LOSS_NAME = "tpu_grpo"
"""The name of `policy_loss` in Tunix's registry."""


@function_registry.register_policy_loss_fn(LOSS_NAME)
def policy_loss(
    model: nnx.Module, train_example: Any, algo_config: Any, pad_id: int, eos_id: int
) -> tuple[jax.Array, dict[str, Any]]:
    """Compute the loss of one `TrainExample` under a `GrpoAlgorithmConfig`, called by Tunix's trainer.

    Returns:
        The loss, a float32 scalar, and what is measured beside it: "kl" to the reference and "pg_clipfrac" as means
        over tokens, "entropy" aggregated like the loss, and "agreement", the `AgreementSums`.
    """
    mask_BT = train_example.completion_mask
    aggregate = functools.partial(
        common.aggregate_loss, completion_mask=mask_BT, loss_agg_mode=algo_config.loss_agg_mode
    )
    policy_logps_BT, logits_BTV = _logps_and_logits(model, train_example, algo_config.temperature, pad_id, eos_id)
    logprobs_BT = policy_logps_BT.astype(jnp.float32)

    losses = algo_config.algorithm.token_losses(
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=train_example.old_per_token_logps.astype(jnp.float32),
        advantages_B1=train_example.advantages.astype(jnp.float32)[:, None],
    )
    loss_BT = losses.loss_BT
    if train_example.sampler_is_weights is not None:
        loss_BT = loss_BT * train_example.sampler_is_weights.astype(jnp.float32)
    loss = aggregate(loss_BT)

    kl = jnp.zeros(())
    if train_example.ref_per_token_logps is not None:
        kl_BT = common.compute_kl_divergence(logprobs_BT, train_example.ref_per_token_logps, algo_config.kl_loss_mode)
        kl = (kl_BT * mask_BT).sum() / jnp.clip(mask_BT.sum(), min=1)
        loss = loss + algo_config.beta * aggregate(kl_BT)
    return loss, {
        "kl": kl,
        "pg_clipfrac": algo_core.masked_mean(losses.clipped_BT, mask_BT),
        "entropy": aggregate(algo_core.compute_entropy_from_logits(logits_BTV)),
        "agreement": agreement_sums(policy_logps_BT, train_example.rollout_per_token_logps, mask_BT),
    }


def _logps_and_logits(
    model: nnx.Module, train_example: Any, temperature: float, pad_id: int, eos_id: int
) -> tuple[Float[Array, "B T"], Float[Array, "B T V"]]:
    """Run the model: the log-probability of every completion token, and the logits it was taken from."""
    logps_and_logits = common.compute_per_token_logps(
        *split_replaying(model, train_example.experts),
        prompt_tokens=train_example.prompt_ids,
        completion_tokens=train_example.completion_ids,
        pad_id=pad_id,
        eos_id=eos_id,
        stop_gradient=False,
        return_logits=True,
        temperature=temperature,
    )
    assert isinstance(logps_and_logits, tuple)  # because of return_logits
    return logps_and_logits
