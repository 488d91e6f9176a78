"""The loss of a micro-batch: the algorithm's token losses, and what all algorithms have in common around them.

    loss = sum of weight x (importance x correction x algorithm.token_losses + beta x KL - coefficient x entropy)

Without a ratio to the old policy the gradient of the KL estimates is not that of the divergence: of k1 it is zero in
expectation, of k2 it is right for what the policy now has sampled, of k3 it is that of the divergence the other way
round. Times the ratio, of k1 and k3 it is right.

The weights hold the aggregation over the whole update (token_weights.py), so that the losses of micro-batches add up.

Suffixes: R packed rows, S tokens of a row. An algorithm calls them B and T.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from tpu_grpo.algorithms import CorrectionSums, RunAlgorithm, Sequences, token_ratio
from tpu_grpo.learner.agreement import AgreementSums, agreement_sums
from tpu_grpo.learner.entropy import EntropyControl
from tpu_grpo.learner.forward import ModelRows, kl_divergence, run_model


@struct.dataclass(frozen=True)
class TrainBatch:
    """Holds the rows of a micro-batch on the trainer's devices: arrays, or whatever jax puts in their places."""

    rows: ModelRows
    """What the model is run on; its mask is of the tokens that were sampled."""
    weights: Any
    """How much each token counts in the update's loss, float32 [R, S]."""
    advantages: Any
    """float32 [R, S]."""
    rollout_logps: Any
    """The log-probabilities that the engine sampled with, float32 [R, S]."""
    old_logps: Any
    """The denominator of the ratio, float32 [R, S]."""
    importance: Any
    """Multiplies the algorithm's token losses, float32 [R, S]; None stands for 1."""
    reference_logps: Any
    """The initial policy's, for the KL penalty, float32 [R, S]; None without one."""


@dataclass(frozen=True)
class LossSettings:
    """What the loss is, beside the batch."""

    algorithm: RunAlgorithm
    beta: float
    kl_estimator: Literal["low_var_kl", "kl", "mse_kl"]
    temperature: float
    mesh: Mesh | None
    """The trainer's; None where everything lies on one device."""
    kl_unbiased: bool = False
    """Multiply the KL estimates by the ratio to the old policy."""
    entropy_bonus: float = 0.0
    kl_in_loss: bool = True
    """If not, the penalty is in the advantages already, and is only measured."""
    entropy_control: EntropyControl | None = None
    """Adapts the coefficient of the entropy bonus, which is else ``entropy_bonus``."""

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers that the program takes as data, so that other values need no other program."""
        return {"beta": self.beta, "entropy": self.entropy_bonus, **self.algorithm.numbers}

    @property
    def forward(self) -> dict[str, Any]:
        """The keyword arguments of the forward pass."""
        return {"temperature": self.temperature, "mesh": self.mesh}


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
    correction: CorrectionSums | None = None
    """What the algorithm's correction did, if it has one."""


def policy_loss(
    model: nnx.Module, batch: TrainBatch, settings: LossSettings, numbers: Mapping[str, Any] | None = None
) -> tuple[Float[Array, ""], LossSums]:
    """Compute the loss of a micro-batch, through which the gradient flows, and what is measured beside it.

    ``numbers`` take the places of those of the settings.
    """
    numbers = settings.numbers if numbers is None else numbers
    algorithm = settings.algorithm.with_numbers(numbers)
    found, mask_RS = run_model(model, batch.rows, **settings.forward), batch.rows.mask
    counts_RS = batch.weights != 0.0
    counted = partial(_counted, counts_RS)
    now_RS, old_RS = counted(found.logprobs_RS), counted(batch.old_logps)
    sequences, correction = Sequences(batch.rows.segments, counts_RS), None
    losses = algorithm.token_losses(
        logprobs_BT=now_RS, old_logprobs_BT=old_RS, advantages_BT=batch.advantages, sequences=sequences
    )
    loss_RS = losses.loss_BT if batch.importance is None else losses.loss_BT * batch.importance
    if algorithm.correction is not None:
        weights_RS, correction = algorithm.correction.weights(
            now_RS, old_RS, counted(batch.rollout_logps), batch.advantages, sequences
        )
        loss_RS = loss_RS * weights_RS
    kl = jnp.zeros(())
    if batch.reference_logps is not None:
        kl_RS = kl_divergence(now_RS, counted(batch.reference_logps), settings.kl_estimator)
        kl = (kl_RS * mask_RS).sum()
        if settings.kl_in_loss:
            loss_RS = loss_RS + numbers["beta"] * _penalty(kl_RS, now_RS, old_RS, settings)
    if settings.entropy_bonus or settings.entropy_control is not None:
        loss_RS = loss_RS - numbers["entropy"] * found.entropies_RS
    loss = (batch.weights * counted(loss_RS)).sum()
    return loss, LossSums(
        loss=loss,
        kl=kl,
        clipped=(losses.clipped_BT & mask_RS).sum(dtype=jnp.float32),
        entropy=jax.lax.stop_gradient(found.entropies_RS * mask_RS).sum(),
        agreement=agreement_sums(found.logprobs_RS, batch.rollout_logps, mask_RS),
        correction=correction,
    )


def _counted(counts_RS: Bool[Array, "R S"], values_RS: Float[Array, "R S"]) -> Float[Array, "R S"]:
    """Cut off what does not count, whose loss may be anything.

    It is cut off before and after: a gradient of 0 times infinity would not be 0.
    """
    return jnp.where(counts_RS, values_RS, 0.0)


def _penalty(
    kl_RS: Float[Array, "R S"], now_RS: Float[Array, "R S"], old_RS: Float[Array, "R S"], settings: LossSettings
) -> Float[Array, "R S"]:
    return kl_RS * token_ratio(now_RS, old_RS) if settings.kl_unbiased else kl_RS
