"""What a learner is made of, built alike by what trains and by what only compiles."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tpu_grpo.algorithms import ENTROPY_STEP, RunAlgorithm, open_algorithm
from tpu_grpo.config import AlgorithmSection, RunConfig
from tpu_grpo.learner.batches import DATA_AXIS, Batches
from tpu_grpo.learner.entropy import EntropyControl
from tpu_grpo.learner.loss import LossSettings
from tpu_grpo.learner.optimizers import build_optimizer, learning_rate_schedule
from tpu_grpo.learner.reference import own_copy
from tpu_grpo.learner.routing import ReplayShape
from tpu_grpo.learner.rows import RowShape
from tpu_grpo.learner.trained import Frozen, freeze_untrained, has_adapters, trained_type
from tpu_grpo.learner.update import Updater, Values, by_name
from tpu_grpo.models.families.trainer_attention import whole_blocks
from tpu_grpo.records.errors import ConfigError

SMALL_MODEL_PARAMETERS, SMALL_PASS_TOKENS = 4 * 2**20, 192
"""Passes of so small a model take no more tokens than this on a device that is a CPU, unless the config says more:
their temporary memory, gradients among it, is then below 32 MiB, which glibc keeps for the next pass. Larger memory it
returns to the kernel, which clears every page anew: a fifth of the time of an update."""


@dataclass(frozen=True)
class LearnerInputs:
    """Holds what a learner learns with, beside the settings of the run."""

    model: nnx.Module
    """The policy, on ``mesh``; updated in place. What is trained may come in a wider type than ``model.dtype``, to
    which the learner casts it. Where it has adapters, they alone are trained; otherwise the layers of
    ``model.train_layers`` if that is set, or everything."""
    reference: nnx.Module | None
    """The initial policy, if ``algorithm.beta`` > 0. It may be ``model`` itself."""
    mesh: Mesh
    """The trainer's mesh has the axes fsdp and tp."""


@dataclass(frozen=True)
class LearnerParts:
    """Holds the parts that work together in a learner."""

    algorithm: RunAlgorithm
    settings: LossSettings
    shape: RowShape
    batches: Batches
    updater: Updater
    reference: nnx.Module | None
    """The model of the KL penalty, with arrays of its own where updates of the policy change them."""


def build_parts(config: RunConfig, inputs: LearnerInputs) -> LearnerParts:
    """Build the parts of a learner; of descriptions where the model is made of some.

    Raises:
        ConfigError: for an algorithm or optimizer that cannot be trained with, or ``algorithm.beta`` without a
            reference.
    """
    section, model = config.algorithm, inputs.model
    algorithm = open_algorithm(section)
    if section.beta > 0.0 and inputs.reference is None:
        raise ConfigError(f"algorithm.beta={section.beta} needs a reference model, got none; pass one, or set it to 0")
    settings = LossSettings(
        algorithm,
        section.beta,
        section.kl_estimate,
        config.rollout.temperature,
        inputs.mesh,
        section.kl_unbiased,
        section.entropy_bonus,
        section.kl_in == "loss",
        _entropy_control(section),
    )
    freeze_untrained(model, config)
    stepped = cast_to_compute(model, config)
    reference = None
    if section.beta > 0.0 and inputs.reference is not None:
        reference = _reference(config, inputs, frozenset(stepped))
    updater = Updater(
        model,
        stepped,
        build_optimizer(config, stepped),
        learning_rate_schedule(config),
        settings,
        inputs.mesh,
        max_grad_norm=config.optimizer.max_grad_norm,
        residual=config.model.param_dtype == "bfloat16",
    )
    batches = Batches(model, reference, settings, section, inputs.mesh)
    return LearnerParts(algorithm, settings, row_shape(config, model, inputs.mesh), batches, updater, reference)


def row_shape(config: RunConfig, model: nnx.Module, mesh: Mesh) -> RowShape:
    """Say what rows are packed: whole blocks of the model's flash attention, and micro-batches that fill the mesh."""
    settings: Any = getattr(model, "config", None)
    block = settings.flash_attention_block_size if getattr(settings, "use_flash_attention", False) else None
    return RowShape(
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        tokens=whole_blocks(config.row_tokens, block),
        micro_batch=_pass_rows(config, model, mesh),
        replay=ReplayShape(model) if config.algorithm.routing_replay else None,
        group_size=config.algorithm.group_size,
        filtered=config.algorithm.filtered_ratio,
    )


def saved_reference(config: RunConfig, parts: LearnerParts) -> nnx.Module | None:
    """Return the reference if checkpoints hold it, because it is not the initial policy for ever."""
    return parts.reference if config.algorithm.reference_reset_every is not None else None


def _pass_rows(config: RunConfig, model: nnx.Module, mesh: Mesh) -> int:
    """Return the training rows of a forward and backward pass: the config's, or fewer for a small model on CPUs."""
    devices = mesh.shape[DATA_AXIS]
    rows = config.micro_batch_rows(devices)
    if config.algorithm.micro_batch_prompts is not None or mesh.devices.flat[0].platform != "cpu":
        return rows
    if sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) > SMALL_MODEL_PARAMETERS:
        return rows
    return min(rows, devices * max(1, SMALL_PASS_TOKENS // config.row_tokens))


def cast_to_compute(model: nnx.Module, config: RunConfig) -> Values:
    """Cast every parameter to ``model.dtype``, in place.

    Returns:
        The trained parameters in the type that they are stepped in, by name.
    """
    compute, stepped_type = jnp.dtype(config.model.dtype), jnp.dtype(config.model.param_dtype)
    trained = by_name(nnx.state(model, trained_type(model)))
    stepped = {name: _cast(leaf, stepped_type) for name, leaf in trained.items()}
    state = nnx.state(model, nnx.Any(nnx.Param, Frozen))
    nnx.update(model, jax.tree.map(lambda leaf: _cast(leaf, compute), state))
    return stepped


def _cast(leaf: Any, dtype: np.dtype[Any]) -> Any:
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    return leaf.astype(dtype)


def _reference(config: RunConfig, inputs: LearnerInputs, trained: Collection[str]) -> nnx.Module:
    """Make the model of the KL penalty, which shares with the policy what no update changes."""
    if config.algorithm.reference_reset_every is not None:
        return own_copy(inputs.model, trained)
    assert inputs.reference is not None
    copied = nnx.clone(inputs.reference)
    cast_to_compute(copied, config)
    return own_copy(copied, () if has_adapters(inputs.model) else trained)


def _entropy_control(section: AlgorithmSection) -> EntropyControl | None:
    if section.entropy_target is None:
        return None
    return EntropyControl(section.entropy_bonus, section.entropy_target, section.entropy_step or ENTROPY_STEP)
