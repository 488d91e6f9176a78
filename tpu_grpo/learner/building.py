"""Tunix's cluster and GRPO learner for a run, built alike by what trains and by what only compiles."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.sharding import Mesh
from tunix.rl import rl_cluster as rl_cluster_lib
from tunix.rl.rollout.base_rollout import RolloutConfig

from tpu_grpo.config import RunConfig
from tpu_grpo.errors import ConfigError, RewardError
from tpu_grpo.families.flash_attention import whole_blocks
from tpu_grpo.learner.adapter import RolloutAdapter, SamplingEngine
from tpu_grpo.learner.optimizer import build_optimizer
from tpu_grpo.learner.repairs import Cluster
from tpu_grpo.learner.routing import ReplayShape
from tpu_grpo.learner.rows import RowShape
from tpu_grpo.learner.trained import freeze_untrained
from tpu_grpo.learner.tunix_learner import EngineGrpoLearner, GrpoAlgorithmConfig

Role = rl_cluster_lib.Role
DATA_AXIS = "fsdp"
"""The axis of the trainer's mesh that rows are split over."""


@dataclass(frozen=True)
class LearnerInputs:
    """Holds what a learner learns with, beside the settings of the run."""

    model: nnx.Module
    """The policy, on ``mesh``; updated in place. Where it has adapters, they alone are trained; otherwise the layers of
    ``model.train_layers`` if that is set, or everything."""
    reference: nnx.Module | None
    """The initial policy, if ``algorithm.beta`` > 0. It may be ``model`` itself or share its arrays, which costs
    nothing until they part: an update makes new arrays, and what is not trained stays shared."""
    mesh: Mesh
    """The trainer's mesh has the axes fsdp and tp."""
    tokenizer: Any
    """A Hugging Face tokenizer, or anything with encode, decode, bos_id, eos_id and pad_id."""
    pad_id: int
    """This token fills rows."""
    eos_id: int
    """This token ends completions."""


def build_tunix_learner(
    config: RunConfig, cluster_class: type[Cluster], inputs: LearnerInputs, engine: SamplingEngine
) -> EngineGrpoLearner:
    """Build Tunix's learner of a policy; see `Learner` for what the arguments are, and for what is raised."""
    algorithm = GrpoAlgorithmConfig.from_section(config.algorithm)
    adapter = functools.partial(RolloutAdapter, engine=engine, pad_id=inputs.pad_id, eos_id=inputs.eos_id)
    _check_rows_divide(config, inputs.mesh)
    _check_reference(config, inputs.reference)
    freeze_untrained(inputs.model, config)
    cluster = cluster_class(
        actor=inputs.model,
        reference=nnx.clone(inputs.reference) if config.algorithm.beta > 0.0 else None,  # own variables, same arrays
        tokenizer=inputs.tokenizer,
        cluster_config=_cluster_config(config, inputs.mesh, adapter, row_shape(config, inputs.model, inputs.pad_id)),
    )
    return EngineGrpoLearner(cluster, algorithm, reward_fns=[_no_reward])


def row_shape(config: RunConfig, model: nnx.Module, pad_id: int) -> RowShape:
    """Say what rows are padded to; prompts also fill up whole blocks of the model's flash attention."""
    settings: Any = getattr(model, "config", None)
    block = settings.flash_attention_block_size if getattr(settings, "use_flash_attention", False) else None
    added = whole_blocks(config.context_tokens, block) - config.context_tokens
    replay = ReplayShape(model) if config.algorithm.routing_replay else None
    return RowShape(config.data.max_prompt_tokens + added, config.rollout.max_new_tokens, pad_id, replay)


def _cluster_config(
    config: RunConfig, mesh: Mesh, rollout_engine: Any, shape: RowShape
) -> rl_cluster_lib.ClusterConfig:
    accumulates = config.micro_batches > 1  # else unset: Tunix would accumulate over one micro-batch, at a copy's cost
    return rl_cluster_lib.ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
        rollout_engine=rollout_engine,
        training_config=rl_cluster_lib.RLTrainingConfig(
            actor_optimizer=build_optimizer(config),
            eval_every_n_steps=config.run.max_steps,
            mini_batch_size=config.data.prompts_per_step if accumulates else None,
            train_micro_batch_size=config.micro_batch_prompts if accumulates else None,
            data_sharding_axis=(DATA_AXIS,),
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=shape.completion_tokens,
            max_prompt_length=shape.prompt_tokens,
            temperature=config.rollout.temperature,
        ),
    )


def _check_rows_divide(config: RunConfig, mesh: Mesh) -> None:
    rows, devices = config.micro_batch_rows, mesh.shape[DATA_AXIS]
    if rows % devices == 0:
        return
    prompts, group = config.data.prompts_per_step, config.algorithm.group_size
    micro = [d for d in range(1, prompts + 1) if prompts % d == 0 and d * group % devices == 0]
    fsdp = [d for d in range(1, rows + 1) if rows % d == 0 and d <= devices]
    raise ConfigError(
        f"a micro-batch of {rows} rows must divide over meshes.trainer.fsdp={devices} devices; use "
        f"algorithm.micro_batch_prompts in {micro}, or meshes.trainer.fsdp in {fsdp}, or another data.prompts_per_step="
        f"{prompts} or algorithm.group_size={group}"
    )


def _check_reference(config: RunConfig, reference: nnx.Module | None) -> None:
    if config.algorithm.beta > 0.0 and reference is None:
        raise ConfigError(
            f"algorithm.beta={config.algorithm.beta} needs a reference model, got none; pass one, or set it to 0"
        )


def _no_reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    raise RewardError("the learner scores nothing itself: call Learner.update with a ScoredRollout")
