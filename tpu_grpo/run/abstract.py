"""A run without arrays: its model, engine and weight sync as a run builds them, of shapes instead of values.

    with checkpoint_without_weights(config) as checkpoint:
        outline = AbstractRun(config, checkpoint, build_meshes(config, checkpoint, devices), stop_token_ids=[2])
        outline.sync.describe()

The devices may be any that programs can be compiled for, those of a TPU slice on a machine without one among them.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_grpo.config import BUILTIN, RunConfig
from tpu_grpo.learner import LearnerInputs, LearnerPrograms, freeze_untrained, parameters
from tpu_grpo.models import Checkpoint
from tpu_grpo.models.abstract import abstract_checkpoint, abstract_model
from tpu_grpo.models.builtin import write_builtin_config
from tpu_grpo.models.tokenizers import build_byte_tokenizer
from tpu_grpo.rollout.engine import Engine, EngineOptions, engine_mesh
from tpu_grpo.rollout.replicas import Replica, copied, cut
from tpu_grpo.run.engines import build_weight_sync
from tpu_grpo.run.meshes import Meshes
from tpu_grpo.run.parts import builtin_name, check_model, engine_options, with_adapters
from tpu_grpo.weights.sync import WeightSync


@contextmanager
def checkpoint_without_weights(config: RunConfig) -> Iterator[Checkpoint]:
    """The run's model by its config.json alone; of a built-in one that is made for as long as the context lasts.

    Raises:
        CheckpointError, ConfigError: for a model that cannot be described, or that is not what the config asks for.
    """
    if not config.model.path.startswith(BUILTIN):
        yield _checked(config, abstract_checkpoint(Path(config.model.path)))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_builtin_config(builtin_name(config), Path(directory))
        yield _checked(config, abstract_checkpoint(Path(directory)))


def _checked(config: RunConfig, checkpoint: Checkpoint) -> Checkpoint:
    check_model(config, checkpoint)
    return checkpoint


@dataclass(frozen=True)
class AbstractRun:
    """What a run would build, made when it is asked for."""

    config: RunConfig
    checkpoint: Checkpoint
    meshes: Meshes
    stop_token_ids: Sequence[int]
    engine_devices: Sequence[Any] | None = None
    """What the engine's programs are compiled for; the first replica's devices when None."""

    @cached_property
    def base(self) -> nnx.Module:
        """The model as it is loaded."""
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
        """What is trained, with adapters or frozen layers."""
        model = with_adapters(self.base, self.checkpoint, self.config)
        freeze_untrained(model, self.config)
        return model

    @cached_property
    def learner(self) -> LearnerPrograms:
        """What it trains with. Token ids and tokenizer decide no shape: others stand in where files are missing."""
        inputs = LearnerInputs(
            model=self.policy,
            reference=self.base if self.config.algorithm.beta > 0.0 else None,
            mesh=self.meshes.trainer,
            tokenizer=build_byte_tokenizer(),
            pad_id=0,
            eos_id=self.stop_token_ids[0],
        )
        return LearnerPrograms(self.config, inputs)

    @property
    def options(self) -> EngineOptions:
        """Of every engine."""
        return engine_options(self.config, self.meshes, self.stop_token_ids)

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """Where the engines are."""
        return cut(self.meshes.sampler_devices, self.meshes.tensor)

    @cached_property
    def engine(self) -> Engine:
        """The first of the run's engines, which are all alike; it gets no weights."""
        devices = self.engine_devices or self.replicas[0].devices
        return Engine.build(self.checkpoint.directory, engine_mesh(devices), self.options)

    @cached_property
    def weight_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The sampler's parameters, on all replicas."""
        return copied(self.engine.weight_specs, self.replicas)

    @cached_property
    def sync(self) -> WeightSync:
        """From the policy to the engines, compiled."""
        return build_weight_sync(self.config, self.checkpoint.weight_rules, parameters(self.policy), self.weight_specs)
