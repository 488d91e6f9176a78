"""From a config to the parts of a run, each built once: the only place that knows every stage's constructor."""

from collections.abc import Collection, Mapping, Sequence
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
from tpu_grpo.fingerprints import model_fingerprints
from tpu_grpo.hosts import Hosts, by_host
from tpu_grpo.learner import Learner, SampledTexts
from tpu_grpo.models import Checkpoint, builtin, check_mesh, load_model, read_checkpoint
from tpu_grpo.models.tokenizers import build_byte_tokenizer, load_tokenizer, stop_token_ids
from tpu_grpo.prompts import PromptStream, open_evaluation_prompts, open_prompts
from tpu_grpo.rewards import SharedRewards, open_rewards
from tpu_grpo.rollout.engine import EngineOptions, choose_attention
from tpu_grpo.rollout.replicas import Replicas, cut
from tpu_grpo.rollout.sampler import EVALUATION_SAMPLE, Sampler, sampling_params
from tpu_grpo.rollout.vocabulary import splits_vocabulary
from tpu_grpo.types import Prompt, Request, SampleKey, SyncResult
from tpu_grpo.weights.copies import CopyCheck
from tpu_grpo.weights.sync import WeightSync, named_leaves

SHARE_BYTES = 4 * 2**30
"""Most bytes of the sampler's weights per device before a replica takes more devices by itself."""


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
    """The trainer's mesh (fsdp, tp), and the sampler's devices, the same, in replicas of ``tensor``."""

    trainer: Mesh
    tensor: int

    @property
    def devices(self) -> list[Any]:
        """All of them, host by host."""
        return list(self.trainer.devices.flat)


class PolicyEngine:
    """Engines that take the trainer's parameters: the joint between learner, weights and rollout."""

    def __init__(
        self, replicas: Replicas, family: str, tokenizer: PreTrainedTokenizerFast, config: RunConfig, hosts: Hosts
    ):
        self.replicas = replicas
        self._family = family
        self._tokenizer = tokenizer
        self._config = config
        self._hosts = hosts
        self._sync: WeightSync | None = None
        self._checks: tuple[CopyCheck, CopyCheck] | None = None

    def install(self, params: nnx.State) -> SyncResult:
        """Move the trainer's parameters into every replica and forget what older ones computed.

        Raises:
            LockstepError: if copies of a parameter differ between hosts.
        """
        leaves = named_leaves(params)
        if self._sync is None:
            self._sync = WeightSync(self._family, leaves, self.replicas.weight_specs)
        weights, result = self._sync(leaves)
        self._check_copies(leaves, weights)
        self.replicas.install_weights(weights)
        return result

    def _check_copies(self, leaves: Mapping[str, jax.Array], weights: Mapping[str, jax.Array]) -> None:
        if self._hosts.count == 1:
            return
        if self._checks is None:
            self._checks = CopyCheck("trainer", leaves), CopyCheck("sampler", weights)
        for check, held in zip(self._checks, (leaves, weights), strict=True):
            check(held, self._hosts)

    def generate_texts(self, prompts: Sequence[str], config: Any) -> SampledTexts:
        """Completions of rendered prompts, for Tunix's own loops; ``config`` is Tunix's RolloutConfig."""
        del config  # the run's settings hold
        encoded = [tuple(self._tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
        sampling, seed = sampling_params(self._config), self._config.run.seed
        requests = [
            Request(ids, sampling, SampleKey(seed, 0, row, EVALUATION_SAMPLE + 1)) for row, ids in enumerate(encoded)
        ]
        completions = tuple(self.replicas.generate(requests))
        texts = tuple(self._tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions)
        return SampledTexts(tuple(encoded), completions, texts)


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
    replicas = Replicas.build(checkpoint.directory, meshes.devices, meshes.tensor, options, hosts)
    if config.hosts.check == "step":
        replicas.check_every_step()
    policy = PolicyEngine(replicas, checkpoint.family.model_type, tokenizer, config, hosts)
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
    replicas.compile_all()
    return Parts(task, Sampler(replicas, tokenizer, config), policy, learner)


def engine_options(config: RunConfig, meshes: Meshes, stop_ids: Sequence[int]) -> EngineOptions:
    """What each of the run's engines is built for."""
    return EngineOptions.from_config(config, stop_ids, replicas=len(meshes.devices) // meshes.tensor)


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
    options = engine_options(config, mesh_shape, [token_id(tokenizer.eos_token_id)])
    replicas = len(mesh_shape.devices) // mesh_shape.tensor
    held_out = "none" if task.evaluation_prompts is None else f"{len(task.evaluation_prompts)} prompts"
    return [
        f"model      {config.model.path}: {described}",
        f"meshes     trainer {dict(mesh_shape.trainer.shape)}, sampler {replicas} x tensor {mesh_shape.tensor}",
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
    held_out = open_evaluation_prompts(config.evaluation, config.data, tokenizer)
    rewards = _open_shared_rewards(config, prompts.columns, hosts)
    evaluation_rewards = _open_shared_rewards(config, tuple(held_out[0].columns), hosts) if held_out else None
    return Task(prompts, rewards, held_out, evaluation_rewards)


def _open_shared_rewards(config: RunConfig, columns: Collection[str], hosts: Hosts) -> SharedRewards:
    rewards = open_rewards(config.rewards, columns)
    compared = [name for name, spec in zip(rewards.names, config.rewards, strict=True) if spec.deterministic]
    return SharedRewards(rewards, hosts, compared)


def build_meshes(config: RunConfig, checkpoint: Checkpoint | None) -> Meshes:
    """Both meshes over all devices, host by host.

    Raises:
        ConfigError: for sizes that do not multiply to the number of devices, or do not divide the model.
    """
    devices, tp = by_host(jax.devices()), config.meshes.trainer.tp
    fsdp = config.meshes.trainer.fsdp or max(1, len(devices) // tp)
    if fsdp * tp != len(devices):
        fitting = [(len(devices) // t, t) for t in range(1, len(devices) + 1) if len(devices) % t == 0]
        raise ConfigError(
            f"meshes.trainer.fsdp x tp must be the number of devices, {len(devices)}, got {fsdp} x {tp}; "
            f"use one of {fitting}"
        )
    tensor = config.meshes.sampler.tensor or default_tensor(config, checkpoint, devices)
    cut(devices, tensor)
    if checkpoint is not None:
        check_mesh(checkpoint, fsdp, tp)
        if tensor not in (fitting := _head_splits(checkpoint)):
            raise ConfigError(
                f"meshes.sampler.tensor must divide the model's {checkpoint.config.num_attention_heads} attention "
                f"heads, and divide its {checkpoint.config.num_key_value_heads} key-value heads or be a multiple of "
                f"them, got {tensor}; use one of {fitting}"
            )
        splits_vocabulary(config.meshes.sampler.shard_vocab, checkpoint.hf_config["vocab_size"], tensor)
    return Meshes(Mesh(np.asarray(devices).reshape(fsdp, tp), ("fsdp", "tp")), tensor)


def default_tensor(config: RunConfig, checkpoint: Checkpoint | None, devices: Sequence[Any]) -> int:
    """The fewest devices a replica whose share of the weights is at most SHARE_BYTES each; it depends on no host.

    Where even the most devices the model's heads allow hold more, that number.
    """
    if checkpoint is None:
        return 1
    weight_bytes = checkpoint.parameter_count * jnp.dtype(config.model.dtype).itemsize
    possible = [t for t in _head_splits(checkpoint) if len(devices) % t == 0]
    return next((t for t in possible if weight_bytes / t <= SHARE_BYTES), possible[-1])


def _head_splits(checkpoint: Checkpoint) -> list[int]:
    """Numbers of devices that an engine's heads divide over; beyond the key-value heads these are repeated."""
    heads, kv_heads = checkpoint.config.num_attention_heads, checkpoint.config.num_key_value_heads
    return [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]


def token_id(value: Any) -> int:
    """A tokenizer's special token id, known to be set."""
    assert isinstance(value, int)
    return value
