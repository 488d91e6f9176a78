"""From a config to the parts of a run, each built once: the only place that knows every stage's constructor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import BUILTIN, RunConfig
from tpu_grpo.errors import ConfigError
from tpu_grpo.fingerprints import fingerprints
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import Learner, SampledTexts
from tpu_grpo.models import Checkpoint, builtin, check_mesh, load_model, read_checkpoint
from tpu_grpo.models.tokenizers import build_byte_tokenizer, load_tokenizer, stop_token_ids
from tpu_grpo.prompts import PromptStream, open_evaluation_prompts, open_prompts
from tpu_grpo.rewards import SharedRewards, open_rewards
from tpu_grpo.rollout.engine import Engine, EngineOptions, choose_attention, engine_mesh
from tpu_grpo.rollout.sampler import EVALUATION_SAMPLE, Sampler, sampling_params
from tpu_grpo.types import Prompt, Request, SampleKey, SyncResult
from tpu_grpo.weights.sync import WeightSync, named_leaves


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
    policy: "PolicyEngine"
    learner: Learner


@dataclass(frozen=True)
class Meshes:
    """The trainer's mesh (fsdp, tp) and the sampler's (data, tensor, expert), over the same devices."""

    trainer: Mesh
    sampler: Mesh


class PolicyEngine:
    """An engine that takes the trainer's parameters: the joint between learner, weights and rollout."""

    def __init__(self, engine: Engine, family: str, tokenizer: PreTrainedTokenizerFast, config: RunConfig):
        self.engine = engine
        self._family = family
        self._tokenizer = tokenizer
        self._config = config
        self._sync: WeightSync | None = None

    def install(self, params: nnx.State) -> SyncResult:
        """Move the trainer's parameters into the engine and forget what older ones computed."""
        leaves = named_leaves(params)
        if self._sync is None:
            self._sync = WeightSync(self._family, leaves, self.engine.weight_specs)
        weights, result = self._sync(leaves)
        self.engine.install_weights(weights)
        return result

    def generate_texts(self, prompts: Sequence[str], config: Any) -> SampledTexts:
        """Completions of rendered prompts, for Tunix's own loops; ``config`` is Tunix's RolloutConfig."""
        del config  # the run's settings hold
        encoded = [tuple(self._tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
        sampling, seed = sampling_params(self._config), self._config.run.seed
        requests = [
            Request(ids, sampling, SampleKey(seed, 0, row, EVALUATION_SAMPLE + 1)) for row, ids in enumerate(encoded)
        ]
        completions = tuple(self.engine.generate(requests))
        texts = tuple(self._tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions)
        return SampledTexts(tuple(encoded), completions, texts)


def build_parts(config: RunConfig, hosts: Hosts) -> Parts:
    """Build everything a training run needs; the sampler holds the policy the learner starts (or resumes) from.

    Raises:
        LockstepError: if hosts were started with anything that differs.
    """
    checkpoint, tokenizer = open_model(config)
    if hosts.count > 1:
        hosts.agree_all(fingerprints(config, checkpoint.directory))
    meshes = build_meshes(config, checkpoint)
    task = open_task(config, tokenizer, hosts)
    stop_ids = stop_token_ids(tokenizer, checkpoint.directory)
    engine = Engine.build(checkpoint.directory, meshes.sampler, EngineOptions.from_config(config, stop_ids))
    if hosts.count > 1 and config.hosts.check == "step":
        engine.check_every_step(lambda number, decisions: hosts.agree(f"scheduling of engine step {number}", decisions))
    policy = PolicyEngine(engine, checkpoint.family.model_type, tokenizer, config)
    model = load_model(checkpoint, meshes.trainer, dtype=jnp.dtype(config.model.dtype), remat=config.model.remat)
    learner = Learner(
        config,
        model=model,
        reference=model if config.algorithm.beta > 0.0 else None,
        mesh=meshes.trainer,
        tokenizer=tokenizer,
        pad_id=token_id(tokenizer.pad_token_id),
        eos_id=token_id(tokenizer.eos_token_id),
        engine=policy,
    )
    policy.install(learner.params())
    engine.compile_all()
    return Parts(task, Sampler(engine, tokenizer, config), policy, learner)


def check(config: RunConfig) -> list[str]:
    """Check everything that can be checked without generating a token; returns what was found, a line each.

    Raises:
        TpuGrpoError: for the first thing that cannot work.
    """
    if config.model.path.startswith(BUILTIN):
        _builtin_name(config)
        tokenizer, described = build_byte_tokenizer(), "built in, taught on first use"
        mesh_shape = build_meshes(config, None)
    else:
        checkpoint, tokenizer = open_model(config)
        mesh_shape = build_meshes(config, checkpoint)
        described = f"{checkpoint.family.model_type}, {checkpoint.parameter_count:,} parameters"
    attention = choose_attention(config.rollout.attention)
    task = open_task(config, tokenizer, Hosts())
    options = EngineOptions.from_config(config, [token_id(tokenizer.eos_token_id)])
    held_out = "none" if task.evaluation_prompts is None else f"{len(task.evaluation_prompts)} prompts"
    return [
        f"model      {config.model.path}: {described}",
        f"meshes     trainer {dict(mesh_shape.trainer.shape)}, sampler tensor {mesh_shape.sampler.shape['tensor']}",
        f"data       {config.data.path}: {task.prompts.len_epoch} prompts, {task.prompts.dropped} dropped as too long",
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
    return checkpoint, load_tokenizer(directory)


def _builtin_name(config: RunConfig) -> str:
    name = config.model.path.removeprefix(BUILTIN)
    if name not in builtin.NAMES:
        raise ConfigError(f"model.path={config.model.path} is not built in; built in: {list(builtin.NAMES)}")
    return name


def open_task(config: RunConfig, tokenizer: PreTrainedTokenizerFast, hosts: Hosts) -> Task:
    """Prompts and rewards, checked against each other's columns; rewards are shared out over the hosts."""
    prompts = open_prompts(config.data, config.run.seed, tokenizer)
    rewards = open_rewards(config.rewards, prompts.columns)
    held_out = open_evaluation_prompts(config.evaluation, config.data, tokenizer)
    evaluation_rewards = rewards.for_columns(tuple(held_out[0].columns)) if held_out else None
    shared = None if evaluation_rewards is None else SharedRewards(evaluation_rewards, hosts)
    return Task(prompts, SharedRewards(rewards, hosts), held_out, shared)


def build_meshes(config: RunConfig, checkpoint: Checkpoint | None) -> Meshes:
    """Both meshes over all devices.

    Raises:
        ConfigError: for sizes that do not multiply to the number of devices, or do not divide the model.
    """
    devices, tp = jax.devices(), config.meshes.trainer.tp
    fsdp = config.meshes.trainer.fsdp or max(1, len(devices) // tp)
    if fsdp * tp != len(devices):
        fitting = [(len(devices) // t, t) for t in range(1, len(devices) + 1) if len(devices) % t == 0]
        raise ConfigError(
            f"meshes.trainer.fsdp x tp must be the number of devices, {len(devices)}, got {fsdp} x {tp}; "
            f"use one of {fitting}"
        )
    tensor = config.meshes.sampler.tensor or len(devices)
    if tensor != len(devices):
        raise ConfigError(
            f"meshes.sampler.tensor must be the number of devices, {len(devices)}, got {tensor}; leave it unset"
        )
    if checkpoint is not None:
        check_mesh(checkpoint, fsdp, tp)
        _check_sampler_heads(checkpoint, tensor)
    return Meshes(Mesh(np.asarray(devices).reshape(fsdp, tp), ("fsdp", "tp")), engine_mesh(devices))


def _check_sampler_heads(checkpoint: Checkpoint, tensor: int) -> None:
    heads, kv_heads = checkpoint.config.num_attention_heads, checkpoint.config.num_key_value_heads
    fitting = [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
    if tensor not in fitting:
        raise ConfigError(
            f"meshes.sampler.tensor must divide the model's {heads} attention heads, and divide its {kv_heads} "
            f"key-value heads or be a multiple of them, got {tensor}; use as many devices as one of {fitting}"
        )


def token_id(value: Any) -> int:
    """A tokenizer's special token id, known to be set."""
    assert isinstance(value, int)
    return value
