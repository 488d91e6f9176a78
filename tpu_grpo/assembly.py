"""From a config to the parts of a run, each built once: the only place that knows every stage's constructor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import BUILTIN, RunConfig
from tpu_grpo.errors import ConfigError
from tpu_grpo.fingerprints import model_fingerprints
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import Learner
from tpu_grpo.models import Checkpoint, builtin, load_model, read_checkpoint
from tpu_grpo.models.adapters import load_adapters
from tpu_grpo.models.lora import adapted_modules, apply_lora, existing_layers
from tpu_grpo.models.tokenizers import build_byte_tokenizer, load_tokenizer, stop_token_ids
from tpu_grpo.placement import Meshes, build_meshes
from tpu_grpo.policy import Policy
from tpu_grpo.probe import Probe
from tpu_grpo.prompts import PromptStream, open_evaluation_prompts, open_prompts, prompts_digest
from tpu_grpo.rewards import SharedRewards, open_rewards
from tpu_grpo.rollout.engine import EngineOptions, choose_attention
from tpu_grpo.rollout.replicas import Replicas
from tpu_grpo.rollout.sampler import Sampler
from tpu_grpo.types import Prompt


@dataclass(frozen=True)
class Task:
    """What is learnt: prompts, rewards and the prompts that are kept for evaluation."""

    prompts: PromptStream
    rewards: SharedRewards
    evaluation_prompts: tuple[Prompt, ...] | None
    evaluation_rewards: SharedRewards | None


@dataclass(frozen=True)
class Parts:
    """Everything the pipeline drives."""

    task: Task
    sampler: Sampler
    policy: Policy
    learner: Learner
    probe: Probe


def build_parts(config: RunConfig, hosts: Hosts) -> Parts:
    """Build everything a training run needs; the sampler holds the policy the learner starts (or resumes) from.

    Raises:
        LockstepError: if hosts hold different parameters.
    """
    checkpoint, tokenizer = open_model(config)
    if hosts.count > 1 and config.model.path.startswith(BUILTIN):  # taught just now, perhaps on every host
        hosts.agree_all(model_fingerprints(checkpoint.directory))
    meshes = build_meshes(config, checkpoint)
    task = open_task(config, tokenizer, hosts)
    options = engine_options(config, meshes, stop_token_ids(tokenizer, checkpoint.directory))
    replicas = Replicas.build(checkpoint.directory, meshes.sampler_devices, meshes.tensor, options, hosts)
    if config.hosts.check == "step":
        replicas.check_every_step()
    policy = Policy(replicas, checkpoint.weight_rules, tokenizer, config, hosts)
    base = load_model(checkpoint, meshes.trainer, dtype=jnp.dtype(config.model.dtype), remat=config.model.remat)
    learner = Learner(
        config,
        model=with_adapters(base, checkpoint, config),
        reference=base if config.algorithm.beta > 0.0 else None,
        mesh=meshes.trainer,
        tokenizer=tokenizer,
        pad_id=token_id(tokenizer.pad_token_id),
        eos_id=token_id(tokenizer.eos_token_id),
        engine=policy,
    )
    policy.install(learner.params())
    replicas.compile_all()
    probe = Probe(config, policy, learner, probe_prompts(task.prompts, meshes))
    probe.after_sync(0)
    return Parts(task, Sampler(replicas, tokenizer, config), policy, learner, probe)


def with_adapters(base: nnx.Module, checkpoint: Checkpoint, config: RunConfig) -> nnx.Module:
    """The model that is trained: the base itself, or one with adapters that shares its arrays."""
    section = config.model.lora
    if section.rank is None:
        return base
    model = apply_lora(base, adapted_modules(checkpoint, section), section, seed=config.run.seed)
    if section.path is not None:
        load_adapters(model, section)
    return model


def probe_prompts(prompts: PromptStream, meshes: Meshes) -> list[Prompt]:
    """At least one for every replica, and as many as divide over the trainer's rows."""
    fsdp, first = meshes.trainer.shape["fsdp"], prompts.batch(1).prompts
    return [first[row % len(first)] for row in range(-(-meshes.replicas // fsdp) * fsdp)]


def engine_options(config: RunConfig, meshes: Meshes, stop_ids: Sequence[int]) -> EngineOptions:
    """What each of the run's engines is built for."""
    return EngineOptions.from_config(config, stop_ids, replicas=meshes.replicas)


def check(config: RunConfig) -> list[str]:
    """Check everything that can be checked without generating a token; returns what was found, a line each.

    Raises:
        TpuGrpoError: for the first thing that cannot work.
    """
    if config.model.path.startswith(BUILTIN):
        _builtin_name(config)
        tokenizer, described = build_byte_tokenizer(), "built in, taught on first use"
        meshes = build_meshes(config, None)
    else:
        checkpoint, tokenizer = open_model(config)
        meshes = build_meshes(config, checkpoint)
        described = f"{checkpoint.family.model_type}, {checkpoint.parameter_count:,} parameters"
    attention = choose_attention(config.rollout.attention)
    task = open_task(config, tokenizer, Hosts())
    options = engine_options(config, meshes, [token_id(tokenizer.eos_token_id)])
    held_out = "none" if task.evaluation_prompts is None else f"{len(task.evaluation_prompts)} prompts"
    return [
        f"model      {config.model.path}: {described}",
        f"meshes     trainer {dict(meshes.trainer.shape)}, sampler {meshes.replicas} x tensor {meshes.tensor}",
        *(
            f"data       {part.name}: {len(part.rendered.prompts)} prompts, {part.rendered.dropped} dropped as too long"
            for part in task.prompts.parts
        ),
        f"rewards    {', '.join(task.rewards.names)}",
        f"evaluation {held_out}",
        f"rollout    {attention} attention, {options.cache_tokens} cache tokens, shapes {options.shapes}",
        f"step       {config.data.prompts_per_step} prompts x {config.algorithm.group_size} completions",
    ]


def open_model(config: RunConfig) -> tuple[Checkpoint, PreTrainedTokenizerFast]:
    """The checkpoint (taught now, if it is built in and new) and its tokenizer."""
    if config.model.path.startswith(BUILTIN):
        directory = builtin.builtin_checkpoint(_builtin_name(config), config.run.seed, progress=True)
    else:
        directory = Path(config.model.path).expanduser()
    checkpoint = read_checkpoint(directory)
    longest = checkpoint.hf_config.get("max_position_embeddings")
    if longest is not None and config.context_tokens > longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens must be <= {longest}, the model's context, got "
            f"{config.data.max_prompt_tokens} + {config.rollout.max_new_tokens}; shorten one of them"
        )
    _check_trained(config, checkpoint)
    return checkpoint, load_tokenizer(directory)


def _check_trained(config: RunConfig, checkpoint: Checkpoint) -> None:
    if config.model.lora.rank is not None:
        adapted_modules(checkpoint, config.model.lora)
    if config.model.train_layers is not None:
        existing_layers(checkpoint, "model.train_layers", config.model.train_layers)


def _builtin_name(config: RunConfig) -> str:
    name = config.model.path.removeprefix(BUILTIN)
    if name not in builtin.NAMES:
        raise ConfigError(f"model.path={config.model.path} is not built in; built in: {list(builtin.NAMES)}")
    return name


def open_task(config: RunConfig, tokenizer: PreTrainedTokenizerFast, hosts: Hosts) -> Task:
    """Prompts and rewards, checked against each other's columns; rewards are shared out over the hosts."""
    prompts = open_prompts(config.data, config.run.seed, tokenizer)
    held_out = open_evaluation_prompts(config.evaluation, config.data, tokenizer)
    _agree_on_prompts(prompts, held_out, hosts)
    rewards = open_rewards(config.rewards, prompts.columns)
    held_out_rewards = rewards.for_columns(tuple(held_out[0].columns)) if held_out else None
    compared = [spec.shown for spec in config.rewards if spec.deterministic]
    shared = None if held_out_rewards is None else SharedRewards(held_out_rewards, hosts, compared)
    return Task(prompts, SharedRewards(rewards, hosts, compared), held_out, shared)


def _agree_on_prompts(prompts: PromptStream, held_out: Sequence[Prompt] | None, hosts: Hosts) -> None:
    """See that hosts read, made or downloaded the same data, whatever kind it is."""
    if hosts.count == 1:
        return
    found = {f"prompts of {part.name}": prompts_digest(part.rendered.prompts) for part in prompts.parts}
    hosts.agree_all(found | {"prompts of the evaluation": prompts_digest(held_out or ())})


def token_id(value: Any) -> int:
    """A tokenizer's special token id, known to be set."""
    assert isinstance(value, int)
    return value
