"""Builds the parts of a learner. Parts built from a model of arrays train this model. Parts built from an abstract
model, which has ``jax.ShapeDtypeStruct`` in place of arrays, only compile the programs.

parts = build_parts(config, LearnerInputs(model=model, reference=None, mesh=mesh))
parts.lower_gradients().compile().memory_analysis()
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tpu_grpo.algorithms import RunAlgorithm, open_algorithm
from tpu_grpo.config import AlgorithmSection, ModelSection, RunConfig, TeacherSpec
from tpu_grpo.learner.batches import DATA_AXIS, Batches
from tpu_grpo.learner.checkpoints import REFERENCE
from tpu_grpo.learner.forward import likeliest, logprobs, vocabulary
from tpu_grpo.learner.frozen import FrozenModel, in_float32
from tpu_grpo.learner.loss import LossSettings, TrainBatch
from tpu_grpo.learner.parameters import cast_to_compute, freeze_untrained, own_copy, trained_type
from tpu_grpo.learner.rows import ReplayShape, RowShape
from tpu_grpo.learner.slices import ONE_SLICE, Slices
from tpu_grpo.learner.teachers import Teacher, TeacherInputs, Teachers
from tpu_grpo.learner.update import Updater
from tpu_grpo.models.families.trainer_attention import block_of, whole_blocks
from tpu_grpo.records.errors import ConfigError

SMALL_MODEL_PARAMETERS, SMALL_PASS_TOKENS, CONCURRENT_PASSES = 4 * 2**20, 192, 2
"""On CPUs, unless the config sets their size, micro-batches of a model of at most SMALL_MODEL_PARAMETERS have at most
SMALL_PASS_TOKENS per device. A pass then takes less than 32 MiB of temporary memory, gradients included, which glibc
keeps for the next pass. glibc returns larger memory to the kernel, which clears the pages before the next use; this
takes a fifth of an update's time. A single CPU device computes CONCURRENT_PASSES at the same time: cores that share the
operations of one pass wait for each other. The number is fixed, so that gradients do not depend on the cores."""


@dataclass(frozen=True)
class LearnerInputs:
    """The models and the mesh that a learner trains with."""

    model: nnx.Module
    """The policy, on ``mesh``; updated in place. The learner casts the parameters to ``model.dtype``; before that,
    trained parameters may have a wider type. If the model has adapters, only these are trained. Otherwise the layers of
    ``model.train_layers`` are trained, or the whole model if that setting is unset."""
    reference: nnx.Module | None
    """The initial policy, needed if ``algorithm.beta`` > 0. It may be ``model`` itself."""
    mesh: Mesh
    """The trainer's mesh, with the axes fsdp and tp."""
    joined: Mesh | None = None
    """With several slices, the meshes of all their trainers, along a first axis, slice."""
    algorithm: RunAlgorithm | None = None
    """The run's algorithm, if it is open already; the learner opens it otherwise."""
    teachers: tuple[TeacherInputs, ...] = ()
    """The models and prompts of the config's teachers, in their order."""


@dataclass(frozen=True)
class LearnerParts:
    """The parts of a learner, and the lowering of its programs."""

    settings: LossSettings
    shape: RowShape
    batches: Batches
    updater: Updater
    reference: FrozenModel | None
    """The reference model of the KL penalty, if any. It has copies of the arrays that updates of the policy change."""
    teachers: Teachers
    previous: nnx.Module | None = None
    """With algorithm.staleness, the policy before the previous step's update, which sampled the current rollout."""
    slices: Slices = ONE_SLICE

    @property
    def saved_frozen(self) -> dict[str, nnx.Module]:
        """The models that no gradient changes, but the run does, so that checkpoints must hold them, by item: the
        reference if it is reset to the policy, and teachers that are moving averages."""
        taught = self.teachers.teachers
        found = {f"teacher_params_{each.spec.shown}": each.frozen.model for each in taught if each.spec.update_rate}
        if self.reference is not None and self.settings.section.reference_reset_every is not None:
            found[REFERENCE] = self.reference.model
        return found

    @property
    def held(self) -> Any:
        """What updates keep on the devices in addition to the model, such as the optimizer's state."""
        return self.updater.state

    @property
    def forward_passes(self) -> int:
        """The number of forward passes before a step's updates, for reference, old policy and entropies: 0 to 3."""
        has_entropies = self.settings.section.top_entropy_quantile < 1.0
        return (self.reference is not None) + self.batches.recomputes + has_entropies

    @cached_property
    def batch(self) -> TrainBatch:
        """The shapes, types and shardings of a micro-batch's arrays."""
        return self.batches.describe(self.shape.empty(self.shape.micro_batch))

    def lower_gradients(self) -> jax.stages.Lowered:
        """Lower the forward and backward pass of a micro-batch."""
        return self.updater.lower_accumulate(self.batch)

    def lower_step(self, shared: Collection[str]) -> jax.stages.Lowered:
        """Lower the optimizer's step for a run whose sampler uses the arrays of the ``shared`` parameters."""
        return self.updater.lower_step(shared)

    def lower_sum_over_slices(self) -> jax.stages.Lowered:
        """Lower the sum of gradients over slices, of which there must be several."""
        return self.updater.lower_sum_over_slices()

    def lower_teacher(self, number: int) -> jax.stages.Lowered:
        """Lower the forward pass of a teacher."""
        taught, teacher = self.teachers, self.teachers.teachers[number]
        rows = teacher.batches.describe(teacher.shape.empty(teacher.shape.micro_batch)).rows
        split, forward = nnx.split(teacher.frozen.model), teacher.batches.settings.forward
        with teacher.mesh:
            return likeliest.lower(*split, rows, count=taught.shape.top_k, below=taught.below, **forward)

    def lower_logprobs(self) -> jax.stages.Lowered:
        """Lower the forward pass for log-probabilities. Without adapters, the reference uses the same program."""
        with self.settings.mesh:
            return logprobs.lower(*nnx.split(self.updater.model), self.batch.rows, **self.settings.forward)


def build_parts(config: RunConfig, inputs: LearnerInputs) -> LearnerParts:
    """Build the parts of a learner; they are abstract if the model is. Raises ConfigError for an algorithm or optimizer
    that cannot be built, or for ``algorithm.beta`` > 0 without a reference."""
    section, model = config.algorithm, inputs.model
    algorithm = inputs.algorithm or open_algorithm(section)
    settings = LossSettings(algorithm, section, config.rollout.temperature, inputs.mesh)
    if section.beta > 0.0 and inputs.reference is None:
        raise ConfigError(f"algorithm.beta={section.beta} needs a reference model, got none; pass one, or set it to 0")
    freeze_untrained(model, config.model)
    stepped = cast_to_compute(model, config.model)
    reference = _reference(section, config.model, inputs, stepped) if section.beta > 0.0 else None
    pairs = list(zip(config.teachers, inputs.teachers, strict=True))
    frozen = [given.model or _teacher_of_the_start(config.model, spec, model, stepped) for spec, given in pairs]
    below = min(map(vocabulary, (model, *(each.model for each in frozen)))) if frozen else 0
    shape = row_shape(config, model, inputs.mesh, min(algorithm.top_k or 0, below))
    slices, made = Slices(inputs.joined), list[Teacher]()
    alone = inputs.mesh.devices.size == 1 and inputs.joined is None
    concurrent = CONCURRENT_PASSES if alone and _is_small(model, inputs.mesh) else 1
    updater = Updater(config.optimizer, config.updates, model, stepped, settings, slices, concurrent)
    batches = Batches(model, reference, settings, recomputes=config.recomputes_old_policy)
    for (spec, given), each in zip(pairs, frozen, strict=True):
        own = batches if given.mesh is None else Batches(each.model, None, replace(settings, mesh=given.mesh))
        made.append(Teacher(spec, each, _teacher_shape(shape, spec, own.settings.mesh, each), own, given.hinted))
    teachers = Teachers(tuple(made), shape, below)
    previous = own_copy(model, stepped) if section.staleness else None
    return LearnerParts(settings, shape, batches, updater, reference, teachers, previous, slices)


def row_shape(config: RunConfig, model: nnx.Module, mesh: Mesh, top_k: int = 0) -> RowShape:
    """Return the shape of packed rows, whose length is a multiple of the block of flash attention, if that is used.
    ``top_k`` is the number of a teacher's likeliest tokens that are compared."""
    rows = config.micro_batch_rows(mesh.shape[DATA_AXIS])
    return RowShape(
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        tokens=whole_blocks(config.row_tokens, block_of(model)),
        micro_batch=rows if config.algorithm.micro_batch_prompts else _pass_rows(rows, config.row_tokens, model, mesh),
        replay=ReplayShape(model) if config.algorithm.replays_routing else None,
        group_size=config.algorithm.group_size,
        filtered=config.algorithm.filtered_ratio,
        carries=config.has_older_tokens,
        chosen=config.algorithm.top_entropy_quantile < 1.0,
        teachers=len(config.teachers),
        top_k=top_k,
        shares=config.shares_prompts,
    )


def _teacher_shape(policy: RowShape, spec: TeacherSpec, mesh: Mesh, frozen: FrozenModel) -> RowShape:
    """Return the shape of a teacher's rows: the policy's, with room for longer prompts, in equally large passes."""
    most = spec.max_prompt_tokens or policy.max_prompt_tokens
    tokens = whole_blocks(policy.tokens + most - policy.max_prompt_tokens, block_of(frozen.model))
    devices = mesh.shape[DATA_AXIS]
    rows = max(1, policy.micro_batch * policy.tokens // tokens // devices) * devices
    return RowShape(most, policy.max_new_tokens, tokens, rows, group_size=policy.group_size, shares=policy.shares)


def _pass_rows(rows: int, row_tokens: int, model: nnx.Module, mesh: Mesh) -> int:
    """Return the number of rows in a micro-batch: ``rows``, or fewer for a small model on CPUs."""
    most = mesh.shape[DATA_AXIS] * max(1, SMALL_PASS_TOKENS // row_tokens)
    return min(rows, most) if _is_small(model, mesh) else rows


def _is_small(model: nnx.Module, mesh: Mesh) -> bool:
    """Whether this is a small model on CPUs."""
    sizes = (leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return mesh.devices.flat[0].platform == "cpu" and sum(sizes) <= SMALL_MODEL_PARAMETERS


def _teacher_of_the_start(
    section: ModelSection, spec: TeacherSpec, policy: nnx.Module, stepped: Mapping[str, Any]
) -> FrozenModel:
    """Make a teacher of the policy before the first step, adapters included; a moving average is kept in float32."""
    copied = own_copy(policy, stepped)
    if spec.update_rate:
        return FrozenModel(in_float32(copied, stepped))
    cast_to_compute(copied, section.model_copy(update={"dtype": spec.dtype or section.dtype}))
    return FrozenModel(copied, offload=spec.offload)


def _reference(
    algorithm: AlgorithmSection, section: ModelSection, inputs: LearnerInputs, trained: Collection[str]
) -> FrozenModel:
    """Make the reference of the KL penalty: the initial policy, or a copy of the policy that the run resets regularly.

    Reference and policy share the arrays that no update changes. With adapters, the initial policy is the base model
    alone. A reference that is reset also has copies of the policy's adapters, so that its forward passes cost as much
    as the policy's.
    """
    if algorithm.reference_reset_every is not None:
        return FrozenModel(own_copy(inputs.model, trained))
    assert inputs.reference is not None
    copied = nnx.clone(inputs.reference)
    cast_to_compute(copied, section)
    return FrozenModel(own_copy(copied, () if trained_type(inputs.model) is nnx.LoRAParam else trained))
