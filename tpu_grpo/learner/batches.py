"""From rows in host memory to the micro-batches on the trainer's devices, with what the loss compares the policy to.

Per token, with old = ``algorithm.old_policy``:

    rollout   ratio = exp(trainer now - engine)
    trainer   ratio = exp(trainer now - trainer before the update), and the token's loss is multiplied by
              min(exp(trainer before the update - engine), importance_cap): truncated importance sampling
              (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"),
              unless ``algorithm.correction`` says otherwise, see algorithms/correction.py
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from tpu_grpo.config import AlgorithmSection
from tpu_grpo.learner.forward import ModelRows, logprobs, lower_logprobs
from tpu_grpo.learner.loss import LossSettings, TrainBatch
from tpu_grpo.learner.rows import TrainRows

DATA_AXIS = "fsdp"
"""The axis of the trainer's mesh that rows are split over."""


class Batches:
    """Makes micro-batches.

    Args:
        policy: the model that is trained.
        reference: the initial policy; None without a KL penalty.
    """

    def __init__(
        self,
        policy: nnx.Module,
        reference: nnx.Module | None,
        settings: LossSettings,
        section: AlgorithmSection,
        mesh: Mesh,
    ):
        self._policy, self._reference, self._settings = policy, reference, settings
        self._recomputed, self._cap = section.old_policy == "trainer", section.upper_importance
        self._truncated = self._recomputed and section.correction is None
        self._mesh = mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))

    def place(self, rows: TrainRows) -> TrainBatch:
        """Put rows on the trainer's devices.

        Every host passes all the rows and keeps its shards. Returns when the arrays are ready: XLA's CPU backend aborts
        when the forward passes of many micro-batches are under way at once.
        """
        placed, rollout_logps = self._rows(rows, self._put), self._put(rows.rollout_logps)
        compared, importance = self._compared(rows, placed), None
        old_logps, reference_logps = compared.get("old_logps", rollout_logps), compared.get("reference_logps")
        if self._truncated:
            importance = truncated_weights(old_logps, rollout_logps, cap=self._cap)
        return jax.block_until_ready(self._batch(rows, placed, self._put, old_logps, importance, reference_logps))

    def compared(self, rows: TrainRows) -> dict[str, Float[Array, "R S"]]:
        """Compute what the loss compares the policy with beside the engine, by the names that `TrainRows` has for it.

        That is the policy as it is now, if it is the old policy, and the reference, if there is one.
        """
        return jax.block_until_ready(self._compared(rows, self._rows(rows, self._put)))

    def describe(self, rows: TrainRows) -> TrainBatch:
        """Give the shapes, types and shardings of `place` without computing or placing anything."""
        logps = self._described(rows.rollout_logps)
        return self._batch(
            rows,
            self._rows(rows, self._described),
            self._described,
            logps,
            logps if self._truncated else None,
            None if self._reference is None else logps,
        )

    def policy_logprobs(self, rows: TrainRows) -> Float[Array, "R S"]:
        """Compute the policy's log-probability of every sampled token, at the temperature."""
        return self._logprobs(self._policy, self._rows(rows, self._put))

    def lower_logprobs(self, rows: TrainRows) -> jax.stages.Lowered:
        """Lower the program of `policy_logprobs`."""
        with self._mesh:
            return lower_logprobs(self._policy, self._rows(rows, self._described), **self._settings.forward)

    def _compared(self, rows: TrainRows, placed: ModelRows) -> dict[str, Float[Array, "R S"]]:
        """Compute what is not known of ``old_logps`` and ``reference_logps``, as far as the loss takes them."""
        found = {}
        if self._reference is not None:
            found["reference_logps"] = self._known(rows.reference_logps, self._reference, placed._replace(experts=None))
        if self._recomputed:
            found["old_logps"] = self._known(rows.old_logps, self._policy, placed)
        return found

    def _known(self, known: np.ndarray | None, model: nnx.Module, placed: ModelRows) -> Float[Array, "R S"]:
        return self._logprobs(model, placed) if known is None else self._put(known)

    def _logprobs(self, model: nnx.Module, rows: ModelRows) -> Float[Array, "R S"]:
        with self._mesh:
            found = logprobs(model, rows, **self._settings.forward)
        return jax.device_put(found, self._sharding)

    @staticmethod
    def _rows(rows: TrainRows, put: Callable[[np.ndarray], Any]) -> ModelRows:
        experts, kept = (None if column is None else put(column) for column in (rows.experts, rows.kept))
        return ModelRows(put(rows.token_ids), put(rows.segments), put(rows.positions), put(rows.mask), experts, kept)

    @staticmethod
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
        )

    def _put(self, value: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(value.shape, self._sharding, lambda index: value[index])

    def _described(self, value: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self._sharding)


@functools.partial(jax.jit, static_argnames="cap")
def truncated_weights(
    trainer_logps: Float[Array, "R S"], engine_logps: Float[Array, "R S"], *, cap: float
) -> Float[Array, "R S"]:
    """Compute min(exp(trainer - engine), cap) of every token."""
    return jnp.minimum(jnp.exp(trainer_logps - engine_logps), cap)
