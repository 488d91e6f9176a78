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
from tpu_grpo.models.described import is_described
from tpu_grpo.models.lora import adapted_modules, apply_lora, existing_layers
from tpu_grpo.models.tokenizers import load_tokenizer, stop_token_ids
from tpu_grpo.placement import Meshes, build_meshes
from tpu_grpo.policy import Policy
from tpu_grpo.probe import Probe
from tpu_grpo.prompts import PromptStream, open_evaluation_prompts, open_prompts
from tpu_grpo.rewards import SharedRewards, open_rewards
from tpu_grpo.rollout.engine import EngineOptions
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
    _agree_on_engines(options, hosts)
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


def _agree_on_engines(options: EngineOptions, hosts: Hosts) -> None:
    """What follows from the settings and decides the programs: hosts that compile different ones could only abort."""
    sizes = {"cache tokens": options.cache_tokens, "shapes": options.shapes}
    hosts.agree_all({f"{name} of an engine": str(value) for name, value in sizes.items()})


def with_adapters(base: nnx.Module, checkpoint: Checkpoint, config: RunConfig) -> nnx.Module:
    """The model that is trained: the base itself, or one with adapters that shares its arrays."""
    section = config.model.lora
    if section.rank is None:
        return base
    model = apply_lora(base, adapted_modules(checkpoint, section), section, seed=config.run.seed)
    if section.path is not None and not is_described(nnx.state(base)):
        load_adapters(model, section)
    return model


def probe_prompts(prompts: PromptStream, meshes: Meshes) -> list[Prompt]:
    """At least one for every replica, and as many as divide over the trainer's rows."""
    fsdp, first = meshes.trainer.shape["fsdp"], prompts.batch(1).prompts
    return [first[row % len(first)] for row in range(-(-meshes.replicas // fsdp) * fsdp)]


def engine_options(config: RunConfig, meshes: Meshes, stop_ids: Sequence[int]) -> EngineOptions:
    """What each of the run's engines is built for."""
    return EngineOptions.from_config(config, stop_ids, replicas=meshes.replicas, platform=meshes.platform)


def open_model(config: RunConfig) -> tuple[Checkpoint, PreTrainedTokenizerFast]:
    """The checkpoint (taught now, if it is built in and new) and its tokenizer."""
    if config.model.path.startswith(BUILTIN):
        directory = builtin.builtin_checkpoint(builtin_name(config), config.run.seed, progress=True)
    else:
        directory = Path(config.model.path).expanduser()
    checkpoint = read_checkpoint(directory)
    check_model(config, checkpoint)
    return checkpoint, load_tokenizer(directory)


def check_model(config: RunConfig, checkpoint: Checkpoint) -> None:
    """What the config asks of the model.

    Raises:
        ConfigError: for longer sequences than it takes, or modules or layers it lacks.
    """
    longest = checkpoint.hf_config.get("max_position_embeddings")
    if longest is not None and config.context_tokens > longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens must be <= {longest}, the model's context, got "
            f"{config.data.max_prompt_tokens} + {config.rollout.max_new_tokens}; shorten one of them"
        )
    if config.model.lora.rank is not None:
        adapted_modules(checkpoint, config.model.lora)
    if config.model.train_layers is not None:
        existing_layers(checkpoint, "model.train_layers", config.model.train_layers)


def builtin_name(config: RunConfig) -> str:
    """Of a model.path that begins with BUILTIN. Raises ConfigError for one that does not exist."""
    name = config.model.path.removeprefix(BUILTIN)
    if name not in builtin.NAMES:
        raise ConfigError(f"model.path={config.model.path} is not built in; built in: {list(builtin.NAMES)}")
    return name


def open_task(config: RunConfig, tokenizer: PreTrainedTokenizerFast, hosts: Hosts) -> Task:
    """Prompts and rewards, checked against each other's columns; rewards are shared out over the hosts."""
    prompts = open_prompts(config.data, config.run.seed, tokenizer)
    held_out = open_evaluation_prompts(config.evaluation, config.data, tokenizer)
    rewards = open_rewards(config.rewards, prompts.columns)
    held_out_rewards = rewards.for_columns(tuple(held_out[0].columns)) if held_out else None
    compared = [spec.shown for spec in config.rewards if spec.deterministic]
    shared = None if held_out_rewards is None else SharedRewards(held_out_rewards, hosts, compared)
    return Task(prompts, SharedRewards(rewards, hosts, compared), held_out, shared)


def token_id(value: Any) -> int:
    """A tokenizer's special token id, known to be set."""
    assert isinstance(value, int)
    return value
