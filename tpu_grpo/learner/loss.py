"""The loss of a micro-batch: a weighted sum over tokens of the algorithm's losses, KL penalty and entropy bonus.

    loss = sum of weight x (importance x correction x algorithm.token_losses + beta x KL - coefficient x entropy)

The correction is that of ``algorithm.correction``, or min(old policy / engine, cap) with ``algorithm.old_policy:
trainer``.

With teachers, the advantage of a token also has the sum over teachers of weight x (log teacher - log policy), see
`Distill` in tpu_grpo/algorithms/distill.py, unless the objective compares likeliest tokens (`Gkd`). Reference and
teachers are independent: beta draws the policy back to where it began, a teacher towards the teacher.

On tokens that the current policy sampled, the expected gradient of the KL estimate k1 is zero, that of k2 is the
gradient of KL(policy || reference), and that of k3 is the gradient of KL(reference || policy). Multiplied by the ratio
to the old policy (``algorithm.kl_unbiased``), k1 and k3 have the gradient of KL(policy || reference), too.

The weights (`token_weights` in rows.py) divide by counts of the whole update, so that losses of micro-batches add up.

Suffixes: R packed rows, S tokens of a row. The algorithms call them B and T.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from tpu_grpo.algorithms import CorrectionSums, RunAlgorithm, Sequences, Taught, token_ratio
from tpu_grpo.algorithms.algorithm import LOG_RATIO_LIMIT
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.learner.forward import ModelRows, PerToken, kl_divergence, run_model, vocabulary
from tpu_grpo.learner.parameters import placed


class EntropySums(NamedTuple):
    """Sums over the forward passes of an update, float32 scalars."""

    entropy: Float[Array, ""]
    tokens: Float[Array, ""]


class EntropyState(NamedTuple):
    """The coefficient of an entropy bonus that is adapted to a target, float32 scalars.

    The rule is that of Skywork-OR1 (He et al. 2025, arXiv 2505.22312). With H_k the mean entropy over the tokens of
    update k, and c_1 = ``algorithm.entropy_bonus``, the paper has

        c_(k+1) = c_k + step where H_k <= target, else c_k - step
        bonus of update k: c_k H where H_k <= target, else none

    Two things differ from the paper. H_k is known only after all forward passes of update k, so that from the second
    update on, the bonus depends on the entropy of the previous update. The coefficient does not fall below 0, where
    the bonus would lower the entropy.

    The coefficient is part of the update's state: one program serves all values, and checkpoints hold it.
    """

    coefficient: Float[Array, ""]
    applied: Float[Array, ""]
    """The coefficient that the next update applies: ``coefficient``, or 0 if the entropy was above the target."""

    @classmethod
    def first(cls, section: AlgorithmSection) -> "EntropyState | tuple[()]":
        """Return the state before the first update; empty if the coefficient is not adapted."""
        first = jnp.asarray(section.entropy_bonus, jnp.float32)
        return () if section.entropy_target is None else cls(first, first)

    def after(self, measured: EntropySums, section: AlgorithmSection) -> "EntropyState":
        """Return the state after an update with these sums."""
        assert section.entropy_target is not None
        low, step = measured.entropy <= section.entropy_target * measured.tokens, section.entropy_change
        coefficient = jnp.maximum(self.coefficient + jnp.where(low, step, -step), 0.0)
        return EntropyState(coefficient, jnp.where(low, coefficient, 0.0))


@struct.dataclass(frozen=True)
class TrainBatch:
    """Rows to train on. The fields are NumPy arrays in host memory, arrays of a micro-batch on the trainer's devices,
    descriptions of these, or tracers."""

    rows: ModelRows
    """The inputs of the model; their mask marks the tokens that were sampled."""
    weights: Any
    """How much each token counts in the update's loss, float32 [R, S]; see `token_weights` in rows.py."""
    advantages: Any
    """float32 [R, S]."""
    rollout_logps: Any
    """The log-probabilities that the engine sampled with, float32 [R, S]."""
    old_logps: Any = None
    """The old policy's log-probabilities, the denominator of the ratio, float32 [R, S]. None on the devices if the loss
    takes its own; in host memory, None unless they were computed before."""
    importance: Any = None
    """Multiplies the algorithm's token losses, float32 [R, S]; None stands for 1."""
    reference_logps: Any = None
    """The reference's log-probabilities, for the KL penalty, float32 [R, S]. None without a penalty. In host
    memory this is also None unless these log-probabilities were computed before."""
    older: Any = None
    """Which tokens an earlier rollout sampled, bool [R, S]; None if there are none such (has_older_tokens)."""
    teacher_weights: Any = None
    """The weights of the teachers, float32 [R, S, N], or their sum [R, S] with ``teacher_logps``; None without any."""
    teacher_logps: Any = None
    """The sum over teachers of weight x log-probability, float32 [R, S]; None if likeliest tokens are compared."""
    teacher_ids: Any = None
    """The K likeliest tokens of each teacher, int32 [R, S, N, K]; None if only the sampled token is compared."""
    teacher_top: Any = None
    """The teachers' log-probabilities of these tokens and of all others together, float32 [R, S, N, K + 1]."""

    def chunks(self, size: int) -> "Iterator[TrainBatch]":
        """Cut the rows into consecutive pieces of ``size`` rows."""
        for start in range(0, len(self.weights), size):
            yield jax.tree.map(itemgetter(slice(start, start + size)), self)


@dataclass(frozen=True, eq=False)
class LossSettings:
    """The settings of the loss."""

    algorithm: RunAlgorithm
    section: AlgorithmSection
    temperature: float
    mesh: Mesh
    """The trainer's mesh."""

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers that the compiled program takes as inputs, so that other values need no recompilation.

        They are the weight of the KL penalty, the coefficient of the entropy bonus, the upper limit of truncated
        importance weights, and what the algorithm and its correction list in their attribute ``numbers``, such as the
        bounds of a clip. Whether there is a penalty, a bonus or a bound at all is part of the program.
        """
        section = self.section
        cap = {"cap": section.upper_importance} if section.truncates_importance else {}
        return {"beta": section.beta, "entropy": section.entropy_bonus, **cap, **self.algorithm.numbers}

    def placed_numbers(self, entropy: EntropyState | tuple[()]) -> dict[str, Any]:
        """Return `numbers` as float32 arrays on all devices; an adapted entropy coefficient comes from ``entropy``."""
        return self._placed | ({"entropy": entropy.applied} if isinstance(entropy, EntropyState) else {})

    @cached_property
    def _placed(self) -> dict[str, Any]:
        return jax.tree.map(lambda value: placed(np.asarray(value, np.float32), self.everywhere), self.numbers)

    @property
    def described_numbers(self) -> dict[str, Any]:
        """The shapes, types and shardings of what `placed_numbers` returns."""
        described = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.everywhere)
        return jax.tree.map(lambda _: described, self.numbers)

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of arrays that every device of the trainer holds."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def forward(self) -> dict[str, Any]:
        """The keyword arguments of the forward pass."""
        return {"temperature": self.temperature, "mesh": self.mesh}


class AgreementSums(NamedTuple):
    """How far the engine's log-probabilities are from the trainer's, measured in the forward pass of the update.

    The fields are float32 scalars that add up over micro-batches, except ``abs_max``, a maximum. The metrics are over
    the n sampled tokens of a step's first update. With d = trainer's - engine's log-probability of a token, w = exp(d):

        logprob_abs_diff_max, _mean   maximum and mean of abs(d)
        ratio_mean                    mean of w; 1 in expectation if the engine sampled without top-k, top-p and min-p
        kl                            mean of w - 1 - d, the k3 estimate of KL(engine || trainer)
                                      (http://joschu.net/blog/kl-approx.html); never negative
        effective_sample_size         (sum w)^2 / (n sum w^2), in (0, 1]: the effective number of tokens if each is
                                      weighted by w, as a share of n

    Sums are of w - 1, not of w, because w is so close to 1 that a float32 sum of w would lose most of the difference.
    """

    tokens: Any
    abs_sum: Any
    abs_max: Any
    excess_sum: Any
    """The sum of w - 1."""
    excess_square_sum: Any
    """The sum of (w - 1)^2."""
    kl_sum: Any
    """The sum of w - 1 - d."""


class LossSums(NamedTuple):
    """Sums of a forward pass: float32 scalars that add up over micro-batches, except ``agreement.abs_max``."""

    loss: Any
    kl: Any
    """The sum of the KL estimates of all sampled tokens; the number of tokens is ``agreement.tokens``."""
    clipped: Any
    """The number of tokens whose loss was clipped."""
    entropy: Any
    """The sum of the entropies of the distributions that the tokens were drawn from."""
    agreement: AgreementSums
    correction: CorrectionSums | None = None
    """The sums of the algorithm's correction, if it has one."""
    ratio_excess: Any = None
    """The sum of (ratio to the old policy - 1) over all tokens. None if the engine is the old policy, because
    ``agreement.excess_sum`` is this sum then."""
    by_age: tuple[AgreementSums, AgreementSums] | None = None
    """The agreement on tokens sampled by the current weights, and by older weights; None if no token is older."""


def policy_loss(
    model: nnx.Module, batch: TrainBatch, settings: LossSettings, numbers: Mapping[str, Any] | None = None
) -> tuple[Float[Array, ""], LossSums]:
    """Compute the loss of a micro-batch, through which the gradient flows, and the sums for the metrics.

    ``numbers``, if given, replace the numbers of the settings.
    """
    numbers = settings.numbers if numbers is None else numbers
    algorithm, section = settings.algorithm.with_numbers(numbers), settings.section
    mask_RS, counts_RS = batch.rows.mask, batch.weights != 0.0
    also_RSM = None if batch.teacher_ids is None else batch.teacher_ids.reshape(*mask_RS.shape, -1)
    found = run_model(model, batch.rows, also_RSM=also_RSM, **settings.forward)

    def counted(values_RS: PerToken) -> PerToken:
        # Called before and after the losses: values of tokens that do not count may be infinite, and 0 * inf is NaN.
        return jnp.where(counts_RS, values_RS, 0.0)

    old_logps_RS = jax.lax.stop_gradient(found.logprobs_RS) if batch.old_logps is None else batch.old_logps
    now_RS, old_RS = counted(found.logprobs_RS), counted(old_logps_RS)
    sequences, correction = Sequences(batch.rows.segments, counts_RS), None
    advantages_RS, taught = batch.advantages, None
    if batch.teacher_logps is not None:
        advantages_RS += jax.lax.stop_gradient(counted(batch.teacher_logps - batch.teacher_weights * now_RS))
    if batch.teacher_ids is not None:
        counts_RS11, shape = counts_RS[..., None, None], batch.teacher_ids.shape
        policy_RSNK = jnp.where(counts_RS11, found.also_RSM.reshape(shape), 0.0)
        top_RSNK = jnp.where(counts_RS11, batch.teacher_top, 0.0)
        taught = Taught(top_RSNK, policy_RSNK, batch.teacher_weights, has_rest=shape[-1] < vocabulary(model))
    losses = algorithm.token_losses(
        logprobs_BT=now_RS, old_logprobs_BT=old_RS, advantages_BT=advantages_RS, sequences=sequences, taught=taught
    )
    loss_RS = losses.loss_BT if batch.importance is None else losses.loss_BT * batch.importance
    if section.truncates_importance:
        loss_RS = loss_RS * jnp.minimum(jnp.exp(old_RS - counted(batch.rollout_logps)), numbers["cap"])
    if algorithm.correction is not None:
        weights_RS, correction = algorithm.correction.weights(
            now_RS, old_RS, counted(batch.rollout_logps), advantages_RS, sequences
        )
        loss_RS = loss_RS * weights_RS
    kl = jnp.zeros(())
    if batch.reference_logps is not None:
        of_all_RS = kl_divergence(found.logprobs_RS, batch.reference_logps, section.kl_estimate)
        kl = jnp.where(mask_RS, of_all_RS, 0.0).sum()
        if section.kl_in == "loss":  # else the advantages include it
            kl_RS = kl_divergence(now_RS, counted(batch.reference_logps), section.kl_estimate)
            penalty_RS = kl_RS * token_ratio(now_RS, old_RS) if section.kl_unbiased else kl_RS
            loss_RS = loss_RS + numbers["beta"] * penalty_RS
    if section.entropy_bonus or section.entropy_target is not None:
        loss_RS = loss_RS - numbers["entropy"] * found.entropies_RS
    loss, agreement = (batch.weights * counted(loss_RS)).sum(), partial(agreement_sums, found.logprobs_RS)
    return loss, LossSums(
        loss=loss,
        kl=kl,
        clipped=(losses.clipped_BT & mask_RS).sum(dtype=jnp.float32),
        entropy=jax.lax.stop_gradient(found.entropies_RS * mask_RS).sum(),
        agreement=agreement(batch.rollout_logps, mask_RS),
        correction=correction,
        ratio_excess=agreement(old_logps_RS, mask_RS).excess_sum if section.old_policy == "trainer" else None,
        by_age=None
        if (older_RS := batch.older) is None
        else (agreement(batch.rollout_logps, mask_RS & ~older_RS), agreement(batch.rollout_logps, mask_RS & older_RS)),
    )


def agreement_sums(trainer_logps_RS: PerToken, engine_logps_RS: PerToken, mask_RS: Bool[Array, "R S"]) -> AgreementSums:
    """Compute the sums over the tokens of a micro-batch; no gradient flows through them."""
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
    """Compute the metrics ``agreement/*`` from the sums of an update's micro-batches."""
    table = np.asarray(sums, np.float64)
    total = AgreementSums(*table.sum(axis=0))
    n = total.tokens
    weight_square_sum = n + 2 * total.excess_sum + total.excess_square_sum
    sample_size = np.minimum(1.0, (n + total.excess_sum) ** 2 / (n * weight_square_sum))
    return {
        "agreement/logprob_abs_diff_max": float(AgreementSums(*table.max(axis=0)).abs_max),
        "agreement/logprob_abs_diff_mean": float(total.abs_sum / n),
        "agreement/ratio_mean": float(1 + total.excess_sum / n),
        "agreement/kl": float(total.kl_sum / n),
        "agreement/effective_sample_size": float(sample_size),
    }


def agreement_by_age(
    sums: Sequence[LossSums], *, stale: bool = False, sampled_by: AgreementSums | None = None
) -> dict[str, float]:
    """Compute the metrics ``agreement/*`` from the sums of an update's micro-batches.

    With carried completions, ``agreement/*`` covers the tokens that the current weights sampled, if there are any, and
    ``agreement/older_*`` the tokens that older weights sampled. If ``stale`` (algorithm.staleness),
    ``agreement/older_*`` covers all tokens, and ``agreement/*`` is computed from ``sampled_by``, if that is given.
    """
    by_age: Sequence[Sequence[AgreementSums]]
    if stale:
        by_age = [] if sampled_by is None else [sampled_by], [each.agreement for each in sums]
    elif any(each.by_age is None for each in sums):
        return agreement_metrics([each.agreement for each in sums])
    else:
        by_age = list(zip(*(each.by_age for each in sums if each.by_age is not None), strict=True))
    found = dict[str, float]()
    for prefix, of_age in zip(("agreement/", "agreement/older_"), by_age, strict=True):
        if any(float(each.tokens) for each in of_age):
            metrics = agreement_metrics(of_age)
            found |= {name.replace("agreement/", prefix): value for name, value in metrics.items()}
    return found
