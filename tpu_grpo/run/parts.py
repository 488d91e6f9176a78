"""Builds the parts of a run from its config, with task.py, which opens what the policy learns.

Read ``build_parts`` first; the functions it calls follow in call order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedTokenizerFast

from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import BUILTIN, HUB, RunConfig
from tpu_grpo.data import PromptStream
from tpu_grpo.engine.dealing import divided_places
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.sampler import Sampler
from tpu_grpo.environments.episodes import Environments
from tpu_grpo.hosts import Hosts, announce, counted, keep_programs
from tpu_grpo.learner import Learner, LearnerInputs
from tpu_grpo.models import builtin
from tpu_grpo.models.checkpoint import Checkpoint, read_checkpoint
from tpu_grpo.models.lora import adapted_modules, apply_lora, cast_adapters, load_adapters
from tpu_grpo.models.tokenizers import load_tokenizer
from tpu_grpo.models.tunix_model import check_finite, is_abstract, load_model
from tpu_grpo.records.stages import Prompt
from tpu_grpo.run.data import OpenData
from tpu_grpo.run.engines import SyncedEngines
from tpu_grpo.run.environments import stop_ids
from tpu_grpo.run.failures import FailureFiles
from tpu_grpo.run.fingerprints import model_fingerprints
from tpu_grpo.run.meshes import Meshes, build_meshes
from tpu_grpo.run.model import builtin_name, check_model, model_directory
from tpu_grpo.run.probe import Probe
from tpu_grpo.run.task import Task, open_task


@dataclass(frozen=True)
class Parts:
    """Everything that the pipeline drives."""

    task: Task
    sampler: Sampler
    engines: SyncedEngines
    learner: Learner
    probe: Probe


def build_parts(config: RunConfig, hosts: Hosts, data: OpenData | None = None) -> Parts:
    """Build everything that a training run needs, and install the policy that the learner starts or resumes from.

    Args:
        config: the run.
        hosts: the processes of the run; every one of them calls this.
        data: the prompts, if they are open already.

    Raises:
        LockstepError: if hosts hold different parameters.
        WeightsError: if the probe finds that engines and trainer do not hold the same policy.
    """
    keep_programs(config.run.compilation_cache, hosts)
    open_algorithm(config.algorithm)  # first, so that a bad one is refused before anything is built
    announce(hosts, f"opening the model {config.model.path}")
    checkpoint, tokenizer = open_model(config, hosts)
    meshes = build_meshes(config, checkpoint)
    task = open_task(config, tokenizer, hosts, data)
    engines = open_engines(config, hosts, checkpoint, tokenizer, meshes, task.environments)
    announce(hosts, f"loading {checkpoint.parameter_count:,} parameters")
    learner = Learner(config, open_inputs(config, checkpoint, meshes), hosts)
    failures = FailureFiles(config, hosts, learner.save_apart)
    sampler = Sampler(engines.replicas, tokenizer, config, task.environments)
    learner.keep_failed(failures)
    sampler.keep_broken = failures.of_rollout
    announce(hosts, "compiling the weight sync, and moving the weights into the engine")
    engines.install(learner.params())
    learner.share(engines.shared_leaves)
    with counted(hosts, "compiling the engine's programs") as tell:
        engines.replicas.compile_all(tell)
    probe = Probe(config, engines, learner, probe_prompts(task.prompts, meshes))
    probe.after_sync(0)
    return Parts(task, sampler, engines, learner, probe)


def open_inputs(config: RunConfig, checkpoint: Checkpoint, meshes: Meshes) -> LearnerInputs:
    """Load the models that a learner learns with onto the trainer's devices."""
    base = load_model(
        checkpoint,
        meshes.trainer,
        dtype=jnp.dtype(config.model.dtype),
        remat=config.model.remat,
        flash_block=meshes.flash_block,
        param_dtype=jnp.dtype(config.model.dtype if config.model.lora.rank else config.model.param_dtype),
    )
    check_finite(base, checkpoint.directory)
    return LearnerInputs(
        model=with_adapters(base, checkpoint, config),
        reference=base if config.algorithm.beta > 0.0 else None,
        mesh=meshes.trainer,
    )


def open_model(config: RunConfig, hosts: Hosts) -> tuple[Checkpoint, PreTrainedTokenizerFast]:
    """Open the checkpoint and its tokenizer; a host without the built-in model trains it now."""
    if config.model.path.startswith(BUILTIN):
        directory = builtin.builtin_checkpoint(builtin_name(config), config.run.seed, progress=True)
        if hosts.count > 1:
            hosts.agree_all(model_fingerprints(directory))
    else:
        directory = model_directory(config)
        if config.model.path.startswith(HUB):
            hosts.agree("the revision of the model", directory.name)
    checkpoint = read_checkpoint(directory)
    check_model(config, checkpoint)
    return checkpoint, load_tokenizer(directory, config.model.pad_token)


def open_engines(
    config: RunConfig,
    hosts: Hosts,
    checkpoint: Checkpoint,
    tokenizer: PreTrainedTokenizerFast,
    meshes: Meshes,
    environments: Environments | None,
) -> SyncedEngines:
    """Build the engines on the sampler's devices; they have no weights until some are installed.

    They stop at the tokens that `stop_ids` names.
    """
    options = engine_options(config, meshes, stop_ids(config, tokenizer, checkpoint.directory))
    _agree_on_engines(options, hosts)
    replicas = Replicas.build(checkpoint.directory, meshes.sampler_devices, meshes.tensor, options, hosts)
    if environments is not None:
        divided_places(environments.places, [replica.hosts for replica in replicas.replicas])  # refuses too few
    if config.hosts.check == "step":
        replicas.check_every_launch()
    return SyncedEngines(replicas, checkpoint.weight_rules, tokenizer, config, hosts)


def engine_options(config: RunConfig, meshes: Meshes, stop_ids: Sequence[int]) -> EngineOptions:
    """Derive the options of the run's engines, which are all alike."""
    return EngineOptions.from_config(config, stop_ids, replicas=meshes.replicas, platform=meshes.platform)


def _agree_on_engines(options: EngineOptions, hosts: Hosts) -> None:
    """Check that hosts derive the same sizes from the settings; with different programs, hosts could only abort."""
    sizes = {"cache tokens": options.cache_tokens, "shapes": options.shapes}
    hosts.agree_all({f"{name} of an engine": str(value) for name, value in sizes.items()})


def with_adapters(base: nnx.Module, checkpoint: Checkpoint, config: RunConfig) -> nnx.Module:
    """Return the model that is trained: the base itself, or a model with adapters around the same arrays."""
    section = config.model.lora
    if section.rank is None:
        return base
    model = apply_lora(base, adapted_modules(checkpoint, section), section, seed=config.run.seed)
    cast_adapters(model, config.model.param_dtype)
    if section.path is not None and not is_abstract(nnx.state(base)):
        load_adapters(model, section)
    return model


def token_id(value: Any) -> int:
    """Return a special token id of a tokenizer, which is known to be set."""
    assert isinstance(value, int)
    return value


def probe_prompts(prompts: PromptStream, meshes: Meshes) -> list[Prompt]:
    """Take one prompt for every replica."""
    first = prompts.batch(1).prompts
    return [first[row % len(first)] for row in range(meshes.replicas)]
