"""Turns training rows in host memory into micro-batches on the trainer's devices.

A micro-batch also holds the log-probabilities that the loss needs. ``algorithm.old_policy`` chooses the ratio of a
token. Here e, p and c are the token's log-probabilities under the engine, under the trainer's policy before the step's
first update, and under its current policy:

    rollout   ratio = exp(c - e)
    trainer   ratio = exp(c - p), and the token's loss is multiplied by min(exp(p - e), importance_cap): truncated
              importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you
              off-policy RL training"), or instead by the weights of ``algorithm.correction``, if that is set

Where a step makes one update, p is c without gradient. The loss takes p from its own forward pass, and micro-batches do
not hold it (`RunConfig.recomputes_old_policy`).

Suffixes: R training rows, S tokens of a row.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from tpu_grpo.learner.forward import ModelRows, PerToken, logprobs
from tpu_grpo.learner.frozen import FrozenModel
from tpu_grpo.learner.loss import AgreementSums, LossSettings, TrainBatch, agreement_sums
from tpu_grpo.learner.parameters import placed

DATA_AXIS = "fsdp"
"""The axis of the trainer's mesh over which rows are split."""
_agreement_sums = jax.jit(agreement_sums)


class Batches:
    """Makes micro-batches, with log-probabilities of the old policy, which a forward pass of ``policy`` computes if
    ``recomputes``, and, for a KL penalty, of the reference model."""

    def __init__(
        self, policy: nnx.Module, reference: FrozenModel | None, settings: LossSettings, *, recomputes: bool = False
    ):
        self._policy, self._reference, self.settings, self._mesh = policy, reference, settings, settings.mesh
        self.recomputes, self._from_engine = recomputes, settings.section.old_policy != "trainer"
        self._sharding = NamedSharding(settings.mesh, PartitionSpec(DATA_AXIS))
        self._put = functools.partial(placed, sharding=self._sharding)

    def place(self, batch: TrainBatch) -> TrainBatch:
        """Put rows from host memory on the trainer's devices, and compute the log-probabilities that the loss needs.

        Every host passes all the rows and keeps its shards. Returns when the arrays are ready, because XLA's CPU
        backend aborts when the forward passes of many micro-batches run concurrently.
        """
        batch = jax.tree.map(self._put, batch)
        found: dict[str, Any] = {"old_logps": batch.rollout_logps} if self._from_engine else {}
        found.update(self._compared(batch))
        return jax.block_until_ready(replace(batch, **found))

    def compared(self, batch: TrainBatch) -> dict[str, PerToken]:
        """Compute the log-probabilities that the loss needs in addition to the engine's, by field name in `TrainBatch`.

        These are ``old_logps`` if they are recomputed, and ``reference_logps`` with a KL penalty.
        """
        return jax.block_until_ready(self._compared(replace(batch, rows=self.placed_rows(batch))))

    def describe(self, batch: TrainBatch) -> TrainBatch:
        """Return the shapes, types and shardings of the arrays that `place` makes, without computing anything."""
        batch = jax.tree.map(self._described, batch)
        logps = batch.rollout_logps
        old = logps if self._from_engine or self.recomputes else None
        return replace(batch, old_logps=old, reference_logps=None if self._reference is None else logps)

    def placed_rows(self, batch: TrainBatch) -> ModelRows:
        """Put the model's inputs of a micro-batch on the trainer's devices."""
        return jax.tree.map(self._put, batch.rows)

    def sharded[T](self, found: T) -> T:
        """Split arrays that a model has computed for placed rows over the devices as these rows are."""
        return jax.device_put(found, self._sharding)

    def policy_logprobs(self, batch: TrainBatch, **field: str) -> PerToken:
        """Compute the policy's log-probability, or another ``field`` of `TokenLogprobs`, of every sampled token."""
        return self._logprobs(self._policy, self.placed_rows(batch), **field)

    def agreement_with(self, model: nnx.Module, batch: TrainBatch) -> AgreementSums:
        """Compare the engine's log-probabilities of a placed micro-batch with those of ``model``; see `newest`."""
        found = self._logprobs(model, batch.rows)
        return jax.block_until_ready(_agreement_sums(found, batch.rollout_logps, self.newest(batch)))

    @staticmethod
    def newest(batch: TrainBatch) -> Bool[Array, "R S"]:
        """Mark the sampled tokens of a micro-batch that no earlier rollout sampled."""
        return batch.rows.mask if batch.older is None else batch.rows.mask & ~batch.older

    def _compared(self, batch: TrainBatch) -> dict[str, PerToken]:
        """Return ``old_logps`` and ``reference_logps`` if the loss needs them. Those that the batch already holds are
        not computed again."""
        found, known = {}, batch.reference_logps
        if (reference := self._reference) is not None:
            if known is None:
                known = self.sharded(reference.logprobs(batch.rows, **self.settings.forward))
            found["reference_logps"] = known
        if self.recomputes:
            known = batch.old_logps
            found["old_logps"] = self._logprobs(self._policy, batch.rows) if known is None else known
        return found

    def _logprobs(self, model: nnx.Module, rows: ModelRows, **field: str) -> PerToken:
        with self._mesh:
            found = logprobs(*nnx.split(model), rows, **self.settings.forward, **field)
        return self.sharded(found)

    def _described(self, value: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self._sharding)


def with_top_entropy(batch: TrainBatch, share: float) -> TrainBatch:
    """Turn entropies in ``importance`` into 1 where they are at least the quantile 1 - ``share`` of those of all tokens
    that count, else 0 ("Beyond the 80/20 Rule", arXiv 2506.01939). ``batch`` holds all rows of an update."""
    counted = batch.importance[batch.weights != 0.0]
    threshold = np.quantile(counted, 1.0 - share) if counted.size else 0.0
    return replace(batch, importance=(batch.importance >= threshold).astype(np.float32))


# --- the KL penalty in the reward ------------------------------------------------------------------------------------


def with_kl_in_advantages(
    batches: Sequence[TrainBatch], beta: float, of_all: Callable[[list[Any]], list[Any]] = lambda sums: sums
) -> list[TrainBatch]:
    """Subtract the KL penalty from the advantage of every token, instead of adding it to the loss. Every host must
    call this.

        k_t = log(old policy / reference) of token t,   A_t = A + beta (mean of k over the step's tokens - k_t)

    k_t is the k1 estimate of the KL divergence; no gradient flows through it. Subtracting the mean of k removes the
    part of the penalty that all tokens of the step share, as in tinker-cookbook's ``incorporate_kl_penalty``. There a
    token's penalty may include the discounted k of later tokens; here it is only the token's own k.
    ``algorithm.old_policy`` chooses the old policy. ``batches`` must hold the tokens of the whole step; if they hold
    those of one slice, ``of_all`` turns their sums into those of all slices.
    """
    own = [_kl_sums(batch.old_logps, batch.reference_logps, batch.weights) for batch in batches]
    sums = of_all(jax.device_get(own))
    tokens = math.fsum(float(count) for _, count in sums)
    mean = np.float32(math.fsum(float(total) for total, _ in sums) / max(tokens, 1.0))

    def penalized(batch: TrainBatch) -> PerToken:
        logps = (batch.old_logps, batch.reference_logps)
        return _penalized(batch.advantages, *logps, batch.weights, np.float32(beta), mean)

    return [replace(batch, advantages=penalized(batch)) for batch in batches]


@jax.jit
def _kl_sums(
    old_RS: PerToken, reference_RS: PerToken, weights_RS: PerToken
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    counts_RS = weights_RS != 0.0
    return jnp.where(counts_RS, old_RS - reference_RS, 0.0).sum(), counts_RS.sum(dtype=jnp.float32)


@jax.jit
def _penalized(
    advantages_RS: PerToken, old_RS: PerToken, reference_RS: PerToken, weights_RS: PerToken, beta: Any, mean: Any
) -> PerToken:
    penalty_RS = beta * (mean - (old_RS - reference_RS))
    return advantages_RS + jnp.where(weights_RS != 0.0, penalty_RS, 0.0)
