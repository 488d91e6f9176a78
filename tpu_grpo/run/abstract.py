"""The model, learner, engine and weight sync of a run, built without arrays, so that a plan can compile their programs.

Every array is replaced by a ``jax.ShapeDtypeStruct``. The devices can be any that XLA can compile for, including those
of a TPU slice that this machine does not have.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_grpo.algorithms import RunAlgorithm
from tpu_grpo.config import ModelSection, RunConfig, TeacherSpec
from tpu_grpo.engine.engine import Engine, engine_mesh
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.replicas import Replica, make_replicas, of_slice, replicated_specs
from tpu_grpo.learner import (
    LearnerInputs,
    TeacherInputs,
    cast_to_compute,
    freeze_untrained,
    frozen_leaves,
    parameters,
)
from tpu_grpo.models.builtin import write_builtin_config
from tpu_grpo.models.checkpoint import Checkpoint, abstract_checkpoint
from tpu_grpo.models.fetching import model_directory
from tpu_grpo.models.tunix_model import abstract_model
from tpu_grpo.run.engines import build_weight_sync
from tpu_grpo.run.inputs import builtin_task
from tpu_grpo.run.meshes import Meshes
from tpu_grpo.run.parts import learner_class
from tpu_grpo.run.policies import with_adapters
from tpu_grpo.weights.plan import LeafMove, named_leaves, plan_sync, shared_leaves
from tpu_grpo.weights.sync import WeightSync
from tpu_grpo.weights.transport import Compiler, compiled


@contextmanager
def open_abstract_checkpoint(model: ModelSection, read: Checkpoint | None = None) -> Iterator[Checkpoint]:
    """Yield the checkpoint that the model's config.json describes; a built-in model's file exists during the block.

    ``read`` is the checkpoint of a model that is not built in, if it has been read already. `check_model` checks
    whether it fits a config.

    Raises:
        CheckpointError, ConfigError: for a broken or unsupported config.json.
    """
    with tempfile.TemporaryDirectory() as directory:
        if read is None:
            described = Path(directory)
            if model.builtin is not None:
                write_builtin_config(builtin_task(model), described)
            else:
                described = model_directory(model)
            read = abstract_checkpoint(described)
        yield read


@contextmanager
def open_abstract_teachers(
    teachers: Sequence[TeacherSpec], dtype: Any, read: Sequence[Checkpoint | None] = ()
) -> Iterator[tuple[Checkpoint | None, ...]]:
    """Yield the checkpoints of teachers as `open_abstract_checkpoint` does, None for the policy of the start. ``read``
    are those of `read_teachers`, if that was called already."""
    with ExitStack() as stack:
        pairs = zip([spec.as_model(dtype) for spec in teachers], read or [None] * len(teachers), strict=True)
        yield tuple(
            None if model is None else stack.enter_context(open_abstract_checkpoint(model, known))
            for model, known in pairs
        )


@dataclass(frozen=True)
class AbstractRun:
    """The parts of a run without arrays; each part is built when it is first used."""

    config: RunConfig
    checkpoint: Checkpoint
    meshes: Meshes
    stop_token_ids: Sequence[int]
    engine_devices: Sequence[Any] | None = None
    """The devices that the engine's programs are compiled for; if None, the devices of the first replica."""
    algorithm: RunAlgorithm | None = None
    """The run's algorithm, if it is open already."""
    teachers: tuple[Checkpoint | None, ...] = ()
    """The checkpoints of the config's teachers; None for the policy of the start."""
    sync_compiler: Compiler = compiled
    """Compiles the programs of `sync`."""

    @cached_property
    def base(self) -> nnx.Module:
        """The model as a run loads it, without adapters."""
        model, meshes = self.config.model, self.meshes
        return abstract_model(
            self.checkpoint,
            meshes.trainer,
            dtype=jnp.dtype(model.dtype),
            remat=model.remat,
            flash_block=meshes.flash_block,
        )

    @cached_property
    def policy(self) -> nnx.Module:
        """The model that is trained, with adapters or frozen layers."""
        section = self.config.model
        model = with_adapters(self.base, self.checkpoint, section, self.config.run.seed)
        freeze_untrained(model, section)
        cast_to_compute(model, section)
        return model

    @cached_property
    def learner(self) -> Any:
        """The `LearnerParts` or `TunixParts` of the run's learner, which lower its programs."""
        meshes, teachers = self.meshes, tuple[TeacherInputs, ...]()
        if self.config.teachers:
            from tpu_grpo.run.teachers import teacher_inputs  # most runs have none

            teachers = teacher_inputs(self.config.teachers, self.config.model.dtype, self.teachers, meshes)
        inputs = LearnerInputs(self.policy, self.base, meshes.trainer, meshes.joined, self.algorithm, teachers)
        return learner_class(self.config.algorithm).build(self.config, inputs)

    @property
    def options(self) -> EngineOptions:
        """The options of every engine."""
        meshes, ids = self.meshes, self.stop_token_ids
        return EngineOptions.from_config(self.config, ids, replicas=meshes.replicas, platform=meshes.platform)

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas of the sampler, one for each engine."""
        return make_replicas(self.meshes.sampler_devices, self.meshes.tensor)

    @cached_property
    def engine(self) -> Engine:
        """One engine, without weights; all engines of the run are equal."""
        devices = self.engine_devices or self.replicas[0].devices
        return Engine.build(self.checkpoint.directory, engine_mesh(devices), self.options)

    @cached_property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and shardings of the sampler's parameters on the replicas of this process's slice."""
        return replicated_specs(self.engine.weight_specs, of_slice(self.replicas, self.meshes.slices, self.meshes.own))

    @cached_property
    def sync(self) -> WeightSync:
        """The compiled sync of the weights from the policy to the engines."""
        config, params = self.config, parameters(self.policy)
        rules, alpha = self.checkpoint.weight_rules, config.model.lora.alpha
        specs, compiler = self.weight_specs, self.sync_compiler
        return build_weight_sync(config.meshes, alpha, rules, params, specs, compiler=compiler)

    @cached_property
    def moves(self) -> Sequence[LeafMove]:
        """The moves of the sync, for which nothing is compiled."""
        params, alpha = parameters(self.policy), self.config.model.lora.alpha
        names, frozen = named_leaves(params), frozen_leaves(params)
        return plan_sync(self.checkpoint.weight_rules, names, self.weight_specs, lora_alpha=alpha, frozen=frozen)

    @property
    def shared_leaves(self) -> frozenset[str]:
        """The `shared_leaves` of the sync."""
        return shared_leaves(self.moves)
