"""The learner's programs without a learner: lowered from a model without values, by the code that trains.

inputs = LearnerInputs(model=model, reference=None, mesh=mesh, tokenizer=tokenizer, pad_id=0, eos_id=2)
programs = LearnerPrograms(config, inputs)
programs.lower_update().compile().memory_analysis()
"""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.rl.rollout.base_rollout import RolloutConfig

from tpu_grpo.config import RunConfig
from tpu_grpo.learner.adapter import SampledTexts
from tpu_grpo.learner.building import LearnerInputs, build_tunix_learner, row_shape
from tpu_grpo.learner.repairs import Cluster
from tpu_grpo.learner.rows import TrainRows
from tpu_grpo.learner.trainer import CollectingTrainer
from tpu_grpo.learner.tunix_learner import TrainExample


class _AbstractTrainer(CollectingTrainer):
    """Keeps an optimizer state that has no values either."""

    def __init__(self, *args: Any, **kwargs: Any):
        with mock.patch.object(nnx, "Optimizer", _abstract_optimizer):
            super().__init__(*args, **kwargs)

    def _shard_optimizer(self, mesh: Mesh) -> None:
        del mesh  # it is split already
        self._keep_layout()


class _AbstractCluster(Cluster):
    trainer_class = _AbstractTrainer

    def _load_model(self, model_or_path: Any, mesh: Mesh, data_type: Any = None) -> Any:
        del mesh, data_type  # Tunix looks for arrays to see where it lies
        return model_or_path


class _NoEngine:
    """Stands where a run has its engine: lowering a program samples nothing and installs nothing."""

    def generate_texts(self, prompts: Sequence[str], config: RolloutConfig) -> SampledTexts:
        raise NotImplementedError("a learner without values samples nothing")

    def install(self, params: nnx.State) -> object:
        raise NotImplementedError("a learner without values has none to install")


class LearnerPrograms:
    """Lowers the programs that `Learner` would run for the same arguments; it needs no engine."""

    def __init__(self, config: RunConfig, inputs: LearnerInputs):
        self._config = config
        self._mesh = inputs.mesh
        self._shape = row_shape(config, inputs.model, inputs.pad_id)
        self._tunix = build_tunix_learner(config, _AbstractCluster, inputs, _NoEngine())

    @property
    def _cluster(self) -> Any:
        return self._tunix.rl_cluster

    @property
    def optimizer_state(self) -> nnx.State:
        """Give the shapes of what the optimizer keeps, accumulated gradients among it."""
        return nnx.state(self._cluster.actor_trainer.optimizer)

    @property
    def example(self) -> TrainExample:
        """Give the shapes of a micro-batch."""
        rows, shape = self._config.micro_batch_rows, self._shape
        prompt, completion = (rows, shape.prompt_tokens), (rows, shape.completion_tokens)
        return self._tunix.abstract_example(
            TrainRows(
                prompt_ids=np.zeros(prompt, np.int32),
                prompt_mask=np.zeros(prompt, np.bool_),
                completion_ids=np.zeros(completion, np.int32),
                completion_mask=np.zeros(completion, np.bool_),
                rollout_logps=np.zeros(completion, np.float32),
                advantages=np.zeros(rows, np.float32),
                experts=shape.replay and shape.replay.empty(rows, shape.tokens),
            )
        )

    def lower_update(self) -> jax.stages.Lowered:
        """Lower the train step of a micro-batch: forward pass, backward pass and optimizer."""
        with self._mesh:
            return self._cluster.actor_trainer.lower(self.example)

    def lower_logprobs(self) -> jax.stages.Lowered:
        """Lower the log-probabilities of a micro-batch under the policy, or, but for adapters, under the reference."""
        example = self.example
        with self._mesh:
            return self._cluster.rollout.lower_per_token_logps(
                example.prompt_ids, example.completion_ids, example.experts
            )


def _abstract_optimizer(model: nnx.Module, *args: Any, **kwargs: Any) -> nnx.Optimizer:
    """Build an ``nnx.Optimizer`` without values whose state is sharded like the parameters it belongs to."""
    mesh = jax.tree.leaves(nnx.state(model))[0].sharding.mesh
    optimizer = nnx.eval_shape(lambda abstract: _Optimizer(abstract, *args, **kwargs), model)
    definition, state = nnx.split(optimizer)

    def split(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return nnx.merge(definition, jax.tree.map(split, state, nnx.get_named_sharding(state, mesh)))


_Optimizer = nnx.Optimizer
