"""Turns training rows in host memory into micro-batches on the trainer's devices.

A micro-batch also holds the log-probabilities that the loss needs. ``algorithm.old_policy`` chooses the ratio of a
token. Here e, p and c are the token's log-probabilities under the engine, under the trainer's policy before the step's
first update, and under its current policy:

    rollout   ratio = exp(c - e)
    trainer   ratio = exp(c - p), and the token's loss is multiplied by min(exp(p - e), importance_cap): truncated
              importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you
              off-policy RL training"), or instead by the weights of ``algorithm.correction``, if that is set

Suffixes: R training rows, S tokens of a row.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from tpu_grpo.learner.forward import ModelRows, PerToken, logprobs, lower_logprobs
from tpu_grpo.learner.loss import LossSettings, TrainBatch
from tpu_grpo.learner.rows import TrainRows
from tpu_grpo.records.errors import DataError

DATA_AXIS = "fsdp"
"""The axis of the trainer's mesh over which rows are split."""
PassArrays = dict[str, np.ndarray]
"""The arrays of a `TrainBatch` by name; the names of arrays in its field ``rows`` begin with ``rows.``."""


class Batches:
    """Makes micro-batches, with log-probabilities of the policy and, for a KL penalty, of the reference model."""

    def __init__(self, policy: nnx.Module, reference: nnx.Module | None, settings: LossSettings):
        assert settings.mesh is not None
        self._policy, self._reference, self._settings, self._mesh = policy, reference, settings, settings.mesh
        self._recomputed = settings.section.old_policy == "trainer"
        self._truncated = self._recomputed and settings.section.correction is None
        self._sharding = NamedSharding(settings.mesh, PartitionSpec(DATA_AXIS))
        self._put = functools.partial(_placed, sharding=self._sharding)

    def place(self, rows: TrainRows) -> TrainBatch:
        """Put rows on the trainer's devices, and compute the log-probabilities that the loss needs.

        Every host passes all the rows and keeps its shards. Returns when the arrays are ready, because XLA's CPU
        backend aborts when the forward passes of many micro-batches run at once.
        """
        placed, rollout_logps = _model_rows(rows, self._put), self._put(rows.rollout_logps)
        compared, importance = self._compared(rows, placed), None
        old_logps, reference_logps = compared.get("old_logps", rollout_logps), compared.get("reference_logps")
        if self._truncated:
            importance = truncated_weights(old_logps, rollout_logps, cap=self._settings.section.upper_importance)
        return jax.block_until_ready(_batch(rows, placed, self._put, old_logps, importance, reference_logps))

    def compared(self, rows: TrainRows) -> dict[str, PerToken]:
        """Compute the log-probabilities that the loss needs in addition to the engine's, by field name in `TrainRows`.

        ``old_logps`` are the policy's, for algorithm.old_policy=trainer; ``reference_logps`` are for a KL penalty.
        """
        return jax.block_until_ready(self._compared(rows, _model_rows(rows, self._put)))

    def describe(self, rows: TrainRows) -> TrainBatch:
        """Return the shapes, types and shardings of the arrays that `place` makes, without computing anything."""
        logps, reference = self._described(rows.rollout_logps), self._reference
        importance = logps if self._truncated else None
        placed = _model_rows(rows, self._described)
        return _batch(rows, placed, self._described, logps, importance, None if reference is None else logps)

    def policy_logprobs(self, rows: TrainRows) -> PerToken:
        """Compute the policy's log-probability of every sampled token, at the sampling temperature."""
        return self._logprobs(self._policy, _model_rows(rows, self._put))

    def lower_logprobs(self, rows: TrainRows) -> jax.stages.Lowered:
        """Lower the program of `policy_logprobs`."""
        with self._mesh:
            return lower_logprobs(self._policy, _model_rows(rows, self._described), **self._settings.forward)

    def _compared(self, rows: TrainRows, placed: ModelRows) -> dict[str, PerToken]:
        """Return ``old_logps`` and ``reference_logps`` if the loss needs them: from the rows, or else computed."""
        found, known = {}, rows.reference_logps
        if (reference := self._reference) is not None:
            rerouted = placed._replace(experts=None)
            found["reference_logps"] = self._logprobs(reference, rerouted) if known is None else self._put(known)
        if self._recomputed:
            known = rows.old_logps
            found["old_logps"] = self._logprobs(self._policy, placed) if known is None else self._put(known)
        return found

    def _logprobs(self, model: nnx.Module, rows: ModelRows) -> PerToken:
        with self._mesh:
            found = logprobs(model, rows, **self._settings.forward)
        return jax.device_put(found, self._sharding)

    def _described(self, value: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self._sharding)


def _placed(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _model_rows(rows: TrainRows, put: Callable[[np.ndarray], Any]) -> ModelRows:
    experts, kept = (None if column is None else put(column) for column in (rows.experts, rows.kept))
    return ModelRows(put(rows.token_ids), put(rows.segments), put(rows.positions), put(rows.mask), experts, kept)


def _batch(
    rows: TrainRows, placed: ModelRows, put: Callable[[np.ndarray], Any], old: Any, importance: Any, reference: Any
) -> TrainBatch:
    return TrainBatch(
        rows=placed,
        weights=put(rows.weights),
        advantages=put(rows.advantages),
        rollout_logps=put(rows.rollout_logps),
        old_logps=old,
        importance=importance,
        reference_logps=reference,
        older=None if rows.older is None else put(rows.older),
    )


@functools.partial(jax.jit, static_argnames="cap")
def truncated_weights(trainer_logps: PerToken, engine_logps: PerToken, *, cap: float) -> PerToken:
    """Compute every token's importance weight min(exp(trainer - engine), cap) from its log-probabilities."""
    return jnp.minimum(jnp.exp(trainer_logps - engine_logps), cap)


# --- the KL penalty in the reward ------------------------------------------------------------------------------------


def with_kl_in_advantages(batches: Sequence[TrainBatch], beta: float) -> list[TrainBatch]:
    """Subtract the KL penalty from the advantage of every token, instead of adding it to the loss. Every host must
    call this.

        k_t = log(old policy / reference) of token t,   A_t = A + beta (mean of k over the step's tokens - k_t)

    k_t is the k1 estimate of the KL divergence; no gradient flows through it. Subtracting the mean of k spares a token
    the part of the penalty that all tokens of the step share, as in tinker-cookbook's ``incorporate_kl_penalty``. There
    the penalty of a token may include the discounted k of later tokens; here it is the token's own k alone. The setting
    ``algorithm.old_policy`` chooses the old policy. ``batches`` must hold the tokens of the whole step.
    """
    sums = jax.device_get([_kl_sums(batch.old_logps, batch.reference_logps, batch.weights) for batch in batches])
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


# --- a micro-batch's arrays, as a file holds them --------------------------------------------------------------------


def pass_arrays(batch: TrainBatch) -> dict[str, Any]:
    """Return the arrays of a micro-batch by name, without the fields that are None."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "rows"}
    rows = {f"rows.{name}": value for name, value in batch.rows._asdict().items()}
    return {name: value for name, value in (rows | columns).items() if value is not None}


def placed_pass(arrays: Mapping[str, np.ndarray], mesh: Mesh) -> TrainBatch:
    """Put the arrays of a micro-batch on the trainer's devices, sharded as in the run. Raises DataError if the size of
    the mesh's axis fsdp does not divide the number of rows."""
    count, devices = len(arrays["weights"]), mesh.shape[DATA_AXIS]
    if count % devices:
        raise DataError(
            f"a pass of {count} rows must be split over meshes.trainer.fsdp={devices} devices, which does not divide "
            "it; use as many devices as the run had, or a divisor"
        )
    sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    placed = {name: _placed(value, sharding) for name, value in arrays.items()}
    rows = ModelRows(**{name: placed.get(f"rows.{name}") for name in ModelRows._fields})
    others = {field.name: placed.get(field.name) for field in fields(TrainBatch) if field.name != "rows"}
    return jax.block_until_ready(TrainBatch(rows=rows, **others))
