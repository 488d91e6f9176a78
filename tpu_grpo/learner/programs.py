"""The learner's programs without a learner: lowered from a model without values, by the code that trains.

inputs = LearnerInputs(model=model, reference=None, mesh=mesh)
programs = LearnerPrograms(config, inputs)
programs.lower_gradients().compile().memory_analysis()
"""

from collections.abc import Collection
from functools import cached_property

import jax

from tpu_grpo.config import RunConfig
from tpu_grpo.learner.building import LearnerInputs, build_parts
from tpu_grpo.learner.loss import TrainBatch
from tpu_grpo.learner.rows import TrainRows
from tpu_grpo.learner.update import UpdateState


class LearnerPrograms:
    """Lowers the programs that `Learner` would run for the same arguments."""

    def __init__(self, config: RunConfig, inputs: LearnerInputs):
        self._mesh = inputs.mesh
        self._parts = build_parts(config, inputs)

    @property
    def state(self) -> UpdateState:
        """Describe what is kept between updates beside the model's parameters."""
        return self._parts.updater.state

    @cached_property
    def batch(self) -> TrainBatch:
        """Describe a micro-batch."""
        return self._parts.batches.describe(self._rows)

    @property
    def _rows(self) -> TrainRows:
        shape = self._parts.shape
        return shape.empty(shape.micro_batch)

    def lower_gradients(self) -> jax.stages.Lowered:
        """Lower the forward and backward pass of a micro-batch."""
        with self._mesh:
            return self._parts.updater.lower_accumulate(self.batch)

    def lower_step(self, shared: Collection[str]) -> jax.stages.Lowered:
        """Lower the optimizer's step, of a run whose sampler holds the arrays of the ``shared`` parameters."""
        with self._mesh:
            return self._parts.updater.lower_step(shared)

    def lower_logprobs(self) -> jax.stages.Lowered:
        """Lower the log-probabilities of a micro-batch under the policy, or, but for adapters, under the reference."""
        return self._parts.batches.lower_logprobs(self._rows)
