"""The loss of a micro-batch: the algorithm's token losses, and what all algorithms have in common around them.

    loss = sum of weight x (importance x algorithm.token_losses + beta x KL)

The weights hold the aggregation over the whole step (token_weights.py), so that the losses of micro-batches add up.

Suffixes: B rows, T completion tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float

from tpu_grpo.algorithms import Algorithm
from tpu_grpo.learner.agreement import AgreementSums, agreement_sums
from tpu_grpo.learner.forward import RowIds, entropy, kl_divergence, logprobs_and_logits


@struct.dataclass(frozen=True)
class TrainBatch:
    """Holds the rows of a micro-batch on the trainer's devices: arrays, or whatever jax puts in their places."""

    prompt_ids: Any
    """int32 [B, T_prompt], padded on the left."""
    completion_ids: Any
    """int32 [B, T], padded on the right."""
    completion_mask: Any
    """bool [B, T]."""
    weights: Any
    """How much each token counts in the step's loss, float32 [B, T]."""
    advantages: Any
    """float32 [B]."""
    rollout_logps: Any
    """The log-probabilities that the engine sampled with, float32 [B, T]."""
    old_logps: Any
    """The denominator of the ratio, float32 [B, T]."""
    importance: Any
    """Multiplies the algorithm's token losses, float32 [B, T]; None stands for 1."""
    reference_logps: Any
    """The initial policy's, for the KL penalty, float32 [B, T]; None without one."""
    experts: Any = None
    """What is replayed of the engine's routing, integers [B, LK, T_prompt + T], if anything; see routing.py."""

    @property
    def ids(self) -> RowIds:
        """What the model is run on."""
        return RowIds(self.prompt_ids, self.completion_ids, self.experts)


@dataclass(frozen=True)
class LossSettings:
    """What the loss is, beside the batch."""

    algorithm: Algorithm
    beta: float
    kl_estimator: Literal["low_var_kl", "kl", "mse_kl"]
    temperature: float
    pad_id: int
    """This token fills rows."""
    eos_id: int
    """This token ends completions."""

    @property
    def forward(self) -> dict[str, Any]:
        """The keyword arguments of the forward pass."""
        return {"temperature": self.temperature, "pad_id": self.pad_id, "eos_id": self.eos_id}


class LossSums(NamedTuple):
    """What a forward pass measured: float32 scalars that add up over micro-batches, but for ``agreement.abs_max``."""

    loss: Any
    kl: Any
    """The sum of the KL estimates of all tokens; the number of tokens is ``agreement.tokens``."""
    clipped: Any
    """The number of tokens whose loss was clipped."""
    entropy: Any
    """The sum of the entropies of the distributions that the tokens were drawn from."""
    agreement: AgreementSums


def policy_loss(model: nnx.Module, batch: TrainBatch, settings: LossSettings) -> tuple[Float[Array, ""], LossSums]:
    """Compute the loss of a micro-batch, through which the gradient flows, and what is measured beside it."""
    logprobs_BT, logits_BTV = logprobs_and_logits(model, batch.ids, **settings.forward)
    counts_BT = batch.weights != 0.0

    def counted(values_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
        # The loss of a token that does not count may be anything. It is cut off before and after: a gradient of
        # 0 times infinity would not be 0.
        return jnp.where(counts_BT, values_BT, 0.0)

    now_BT = counted(logprobs_BT)
    losses = settings.algorithm.token_losses(
        logprobs_BT=now_BT, old_logprobs_BT=counted(batch.old_logps), advantages_B1=batch.advantages[:, None]
    )
    loss_BT = losses.loss_BT if batch.importance is None else losses.loss_BT * batch.importance
    mask_BT = batch.completion_mask
    kl = jnp.zeros(())
    if batch.reference_logps is not None:
        kl_BT = kl_divergence(now_BT, counted(batch.reference_logps), settings.kl_estimator)
        kl = (kl_BT * mask_BT).sum()
        loss_BT = loss_BT + settings.beta * kl_BT
    loss = (batch.weights * counted(loss_BT)).sum()
    return loss, LossSums(
        loss=loss,
        kl=kl,
        clipped=(losses.clipped_BT & mask_BT).sum(dtype=jnp.float32),
        entropy=(entropy(logits_BTV) * mask_BT).sum(),
        agreement=agreement_sums(logprobs_BT, batch.rollout_logps, mask_BT),
    )
