"""Builds the parts of a run from its config; task.py puts together what the policy learns."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import RunConfig
from tpu_grpo.engine.dealing import divided_places
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.sampler import Sampler
from tpu_grpo.environments.episodes import Environments
from tpu_grpo.hosts import Hosts, announce, counted, keep_programs
from tpu_grpo.learner import Learner
from tpu_grpo.models.checkpoint import Checkpoint
from tpu_grpo.run.engines import Probe, SyncedEngines
from tpu_grpo.run.inputs import Inputs, open_inputs
from tpu_grpo.run.meshes import Meshes, build_meshes
from tpu_grpo.run.model_files import agreed_checkpoint
from tpu_grpo.run.non_finite import FailureFiles
from tpu_grpo.run.policies import load_inputs
from tpu_grpo.run.task import Task, open_task, stop_ids


@dataclass(frozen=True)
class Parts:
    """Everything that the pipeline drives."""

    checkpoint: Checkpoint
    task: Task
    sampler: Sampler
    engines: SyncedEngines
    learner: Learner
    probe: Probe


def build_parts(config: RunConfig, hosts: Hosts, inputs: Inputs | None = None) -> Parts:
    """Build everything that a training run needs, and install the policy that the learner starts or resumes from.

    Args:
        config: the run.
        hosts: the processes of the run; every one of them calls this.
        inputs: what the run reads, if it is open already.

    Raises:
        LockstepError: if hosts hold different parameters.
        WeightsError: if the probe finds that engines and trainer do not hold the same policy.
    """
    keep_programs(config.run.compilation_cache, hosts)
    algorithm = open_algorithm(config.algorithm)  # first, so that a bad one is refused before anything is built
    inputs = inputs or open_inputs(config)
    announce(hosts, f"opening the model {config.model.path}")
    checkpoint = agreed_checkpoint(config, hosts, inputs.checkpoint)
    meshes = build_meshes(config, checkpoint)
    task = open_task(config, inputs, algorithm, hosts)
    engines = open_engines(config, hosts, checkpoint, inputs.tokenizer, meshes, task.environments)
    announce(hosts, f"loading {checkpoint.parameter_count:,} parameters")
    learner = Learner(config, load_inputs(config, checkpoint, meshes), hosts)
    failures = FailureFiles(config, hosts, learner.save_apart)
    sampler = Sampler(engines.replicas, inputs.tokenizer, config, task.environments)
    learner.keep_failed(failures)
    sampler.keep_broken = failures.of_rollout
    announce(hosts, "compiling the weight sync, and moving the weights into the engine")
    engines.install(learner.params())
    learner.share(engines.shared_leaves)
    with counted(hosts, "compiling the engine's programs") as tell:
        engines.replicas.compile_all(tell)
    first = task.prompts.batch(1).prompts
    probe = Probe(config, engines, learner, [first[row % len(first)] for row in range(meshes.replicas)])
    probe.after_sync(0)
    return Parts(checkpoint, task, sampler, engines, learner, probe)


def open_engines(
    config: RunConfig,
    hosts: Hosts,
    checkpoint: Checkpoint,
    tokenizer: PreTrainedTokenizerFast,
    meshes: Meshes,
    environments: Environments | None,
) -> SyncedEngines:
    """Build the engines on the sampler's devices; they have no weights until some are installed."""
    ids = stop_ids(config, tokenizer, checkpoint.directory)
    options = EngineOptions.from_config(config, ids, replicas=meshes.replicas, platform=meshes.platform)
    sizes = {"cache tokens": options.cache_tokens, "shapes": options.shapes}  # with others, hosts could only abort
    hosts.agree_all({f"{name} of an engine": str(value) for name, value in sizes.items()})
    replicas = Replicas.build(checkpoint.directory, meshes.sampler_devices, meshes.tensor, options, hosts)
    if environments is not None:
        divided_places(environments.places, [replica.hosts for replica in replicas.replicas])  # refuses too few
    if config.hosts.check == "step":
        replicas.check_every_launch()
    return SyncedEngines(replicas, checkpoint.weight_rules, tokenizer, config, hosts)
