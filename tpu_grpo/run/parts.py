"""From a config to the parts of a run, each built once: the only place that knows every stage's constructor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedTokenizerFast

from tpu_grpo.config import BUILTIN, RewardSpec, RunConfig
from tpu_grpo.errors import ConfigError
from tpu_grpo.evaluation import GREEDY, Evaluation, EvaluationSamples, EvaluationSettings, evaluate
from tpu_grpo.hosts import Hosts
from tpu_grpo.learner import Learner, LearnerInputs
from tpu_grpo.models import Checkpoint, builtin, load_model, read_checkpoint
from tpu_grpo.models.abstract import is_abstract
from tpu_grpo.models.adapters import load_adapters
from tpu_grpo.models.lora import adapted_modules, apply_lora, existing_layers
from tpu_grpo.models.tokenizers import load_tokenizer, stop_token_ids
from tpu_grpo.prompts import PromptStream, open_evaluation_prompts, open_prompts, prompts_digest
from tpu_grpo.rewards import DistributedRewards, RewardSet, open_rewards, repeats_itself
from tpu_grpo.rollout.engine import EngineOptions
from tpu_grpo.rollout.replicas import Replicas
from tpu_grpo.rollout.sampler import Sampler
from tpu_grpo.run.engines import SyncedEngines
from tpu_grpo.run.fingerprints import model_fingerprints
from tpu_grpo.run.meshes import Meshes, build_meshes
from tpu_grpo.run.probe import Probe
from tpu_grpo.types import Prompt


@dataclass(frozen=True)
class Task:
    """What is learnt: prompts, rewards and the prompts that are kept for evaluation."""

    prompts: PromptStream
    rewards: DistributedRewards
    held_out: "HeldOut | None"

    def close(self) -> None:
        """Let the rewards close and end their processes."""
        self.rewards.close()
        if self.held_out is not None:
            self.held_out.rewards.close()


@dataclass(frozen=True)
class HeldOut:
    """Prompts that are kept for evaluation, with the rewards that judge their answers."""

    prompts: tuple[Prompt, ...]
    rewards: DistributedRewards
    settings: EvaluationSettings
    best: str
    """mode/reward that the best step is the highest of."""


@dataclass(frozen=True)
class Parts:
    """Everything the pipeline drives."""

    task: Task
    sampler: Sampler
    engines: SyncedEngines
    learner: Learner
    probe: Probe


def build_parts(config: RunConfig, hosts: Hosts) -> Parts:
    """Build everything a training run needs; the sampler holds the policy the learner starts (or resumes) from.

    Raises:
        LockstepError: if hosts hold different parameters.
    """
    checkpoint, tokenizer = open_model(config, hosts)
    meshes = build_meshes(config, checkpoint)
    task = open_task(config, tokenizer, hosts)
    engines = open_engines(config, hosts, checkpoint, tokenizer, meshes)
    base = load_model(
        checkpoint,
        meshes.trainer,
        dtype=jnp.dtype(config.model.dtype),
        remat=config.model.remat,
        flash_block=meshes.flash_block,
    )
    inputs = LearnerInputs(
        model=with_adapters(base, checkpoint, config),
        reference=base if config.algorithm.beta > 0.0 else None,
        mesh=meshes.trainer,
        tokenizer=tokenizer,
        pad_id=token_id(tokenizer.pad_token_id),
        eos_id=token_id(tokenizer.eos_token_id),
    )
    learner = Learner(config, inputs, engines)
    engines.install(learner.params())
    engines.replicas.compile_all()
    probe = Probe(config, engines, learner, probe_prompts(task.prompts, meshes))
    probe.after_sync(0)
    return Parts(task, Sampler(engines.replicas, tokenizer, config), engines, learner, probe)


def open_engines(
    config: RunConfig, hosts: Hosts, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast, meshes: Meshes
) -> SyncedEngines:
    """Engines on the sampler's devices, with the checkpoint's weights until others are installed."""
    options = engine_options(config, meshes, stop_token_ids(tokenizer, checkpoint.directory))
    _agree_on_engines(options, hosts)
    replicas = Replicas.build(checkpoint.directory, meshes.sampler_devices, meshes.tensor, options, hosts)
    if config.hosts.check == "step":
        replicas.check_every_step()
    return SyncedEngines(replicas, checkpoint.weight_rules, tokenizer, config, hosts)


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
    if section.path is not None and not is_abstract(nnx.state(base)):
        load_adapters(model, section)
    return model


def probe_prompts(prompts: PromptStream, meshes: Meshes) -> list[Prompt]:
    """At least one for every replica, and as many as divide over the trainer's rows."""
    fsdp, first = meshes.trainer.shape["fsdp"], prompts.batch(1).prompts
    return [first[row % len(first)] for row in range(-(-meshes.replicas // fsdp) * fsdp)]


def engine_options(config: RunConfig, meshes: Meshes, stop_ids: Sequence[int]) -> EngineOptions:
    """What each of the run's engines is built for."""
    return EngineOptions.from_config(config, stop_ids, replicas=meshes.replicas, platform=meshes.platform)


def open_model(config: RunConfig, hosts: Hosts) -> tuple[Checkpoint, PreTrainedTokenizerFast]:
    """The checkpoint (taught now, perhaps on every host, if it is built in and new) and its tokenizer."""
    if config.model.path.startswith(BUILTIN):
        directory = builtin.builtin_checkpoint(builtin_name(config), config.run.seed, progress=True)
        if hosts.count > 1:
            hosts.agree_all(model_fingerprints(directory))
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
    _agree_on_prompts({part.name: part.rendered.prompts for part in prompts.parts}, hosts)
    rewards = open_rewards(config.rewards, prompts.columns)
    held_out = open_held_out(config, tokenizer, hosts, rewards)
    return Task(prompts, DistributedRewards(rewards, hosts, _compared(config.rewards)), held_out)


def open_held_out(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, hosts: Hosts, rewards: RewardSet | None = None
) -> HeldOut | None:
    """Held-out prompts and their rewards, in the processes of ``rewards`` if these are the run's; None without any."""
    section = config.evaluation
    settings = EvaluationSettings.of(section, config.rollout.temperature)
    prompts = open_evaluation_prompts(section, config.data, tokenizer)
    if prompts is None:
        return None
    _agree_on_prompts({"the evaluation": prompts}, hosts)
    specs, columns = config.rewards if section.rewards is None else section.rewards, tuple(prompts[0].columns)
    if section.rewards is None and rewards is not None:
        judges = rewards.for_columns(columns)
    else:
        judges = open_rewards(specs, columns)
    best = section.best or f"{GREEDY}/{specs[0].shown}"
    return HeldOut(prompts, DistributedRewards(judges, hosts, _compared(specs)), settings, best)


def evaluate_policy(
    sampler: Sampler, held_out: HeldOut, step: int
) -> tuple[Evaluation, tuple[EvaluationSamples, EvaluationSamples]]:
    """Evaluate the policy that the sampler's engines hold; returns the estimates and the samples they are of."""
    return evaluate(sampler.answer, held_out.rewards.score, held_out.prompts, held_out.settings, step=step)


def _compared(specs: Sequence[RewardSpec]) -> list[str]:
    """Rewards that hosts compare, because they give the same value whenever they are asked."""
    return [spec.shown for spec in specs if repeats_itself(spec)]


def _agree_on_prompts(prompts: Mapping[str, Sequence[Prompt]], hosts: Hosts) -> None:
    """See that hosts read, made or downloaded the same data, whatever kind it is."""
    if hosts.count > 1:
        hosts.agree_all({f"prompts of {name}": prompts_digest(found) for name, found in prompts.items()})


def token_id(value: Any) -> int:
    """A tokenizer's special token id, known to be set."""
    assert isinstance(value, int)
    return value
