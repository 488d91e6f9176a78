"""Builds the parts of a run from its config: the task, the engines, and the learner."""

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from tpu_grpo.algorithms import RunAlgorithm, open_algorithm
from tpu_grpo.config import (
    AlgorithmSection,
    DataSection,
    EnvironmentSection,
    EvaluationSection,
    LoraSection,
    MeshesSection,
    ModelSection,
    OptimizerSection,
    RewardSpec,
    RolloutSection,
    RunConfig,
    TeacherSpec,
)
from tpu_grpo.config.plugins import addition
from tpu_grpo.data.rendering import PromptRenderer, template_switches
from tpu_grpo.data.stream import PromptStream, prompts_digest
from tpu_grpo.engine.load_balancing import divided_places
from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.sampler import Sampler
from tpu_grpo.hosts import Hosts, announce, counted, keep_programs
from tpu_grpo.learner import DescribedLearner, Learner, TeacherInputs
from tpu_grpo.models.checkpoint import Checkpoint
from tpu_grpo.models.tokenizers import stop_token_ids
from tpu_grpo.observe.evaluation import GREEDY, Evaluation, EvaluationSamples, evaluate
from tpu_grpo.observe.run_files import EPISODES_DIR
from tpu_grpo.records.errors import ConfigError, RewardError
from tpu_grpo.records.stages import Prompt
from tpu_grpo.rewards import DistributedRewards, RewardSet, open_rewards, repeats_itself
from tpu_grpo.rewards.shipped.correctness import voted_answer
from tpu_grpo.run.conversations import Environments, LoadedEnvironments, load_environments, tools_of
from tpu_grpo.run.engines import Probe, SyncedEngines
from tpu_grpo.run.inputs import HeldOutInputs, Inputs, agreed_checkpoint, check_model, open_held_out
from tpu_grpo.run.meshes import Meshes, build_meshes, check_trainer

if TYPE_CHECKING:
    from tpu_grpo.run.partial_groups import PartialGroups
from tpu_grpo.run.policies import load_inputs


@dataclass(frozen=True)
class Parts:
    """Everything that the pipeline drives."""

    checkpoint: Checkpoint
    task: "Task"
    sampler: Sampler
    engines: SyncedEngines
    learner: Learner
    probe: Probe
    partial: "PartialGroups | None" = None
    """The groups that steps leave for later steps; None without rollout.partial_extra and algorithm.staleness."""


def build_parts(inputs: Inputs, hosts: Hosts) -> Parts:
    """Build everything that a training run needs, and install the learner's initial or restored policy in the engines.

    Every host calls this.

    Raises:
        LockstepError: if hosts hold different parameters.
        WeightsError: if the probe finds that engines and trainer do not hold the same policy.
    """
    config = inputs.config
    keep_programs(hosts)
    algorithm = open_run_algorithm(
        config.algorithm, config.data, config.optimizer
    )  # first, to refuse a bad algorithm before anything is built
    announce(hosts, f"opening the model {config.model.path}")
    checkpoint = agreed_checkpoint(config.model, config.run.seed, hosts, inputs.checkpoint)
    check_model(config, checkpoint)
    section = with_routing_replay(config.algorithm, config.model, config.rollout, checkpoint)
    config = config.model_copy(update={"algorithm": section})
    meshes = build_meshes(config.meshes, config.model, config.environment, config.row_tokens, checkpoint)
    check_trainer(section, checkpoint, meshes)
    task = open_task(inputs, algorithm, hosts)
    if task.environments is not None:
        task.environments.keep_record(config.run_dir / EPISODES_DIR, hosts.index)
    ids = stop_ids(config.environment, config.data, inputs.tokenizer, checkpoint.directory)
    options = EngineOptions.from_config(config, ids, replicas=meshes.replicas, platform=meshes.platform)
    engines = open_engines(options, hosts, checkpoint, meshes, config.meshes, config.model.lora, task.environments)
    if config.hosts.check == "step":
        engines.replicas.check_every_launch()
    announce(hosts, f"loading {checkpoint.parameter_count:,} parameters")
    make, given = learner_class(section), load_inputs(config.model, config.run.seed, checkpoint, meshes, algorithm)
    given = replace(given, teachers=open_teachers(inputs, meshes, hosts))
    trains = meshes.trainer.local_devices
    learner = make(config, given, hosts) if trains else DescribedLearner(config, make.build(config, given), hosts)
    sampler = Sampler(engines.replicas, inputs.tokenizer, config.rollout, section, config.run.seed, task.environments)
    announce(hosts, "compiling the weight sync, and moving the weights into the engine")
    engines.install(learner.params())
    assert engines.sync is not None
    learner.share(engines.sync.shared_leaves)
    with counted(hosts, "compiling the engine's programs") as tell:
        engines.replicas.compile_all(tell)
    first = task.prompts.batch(1).prompts
    probe = Probe(
        *(config.meshes, config.model, config.rollout, config.run.seed, section.replays_routing),
        *(engines, learner, [first[row % len(first)] for row in range(meshes.replicas)]),
    )
    probe.after_sync(0)
    groups = None
    if config.open_groups:
        from tpu_grpo.run.partial_groups import PartialGroups  # only needed here

        sections = config.data, config.rollout, section, config.environment
        groups = PartialGroups(*sections, task.prompts, learner.carried)
    return Parts(checkpoint, task, sampler, engines, learner, probe, groups)


def open_teachers(inputs: Inputs, meshes: Meshes, hosts: Hosts) -> tuple[TeacherInputs, ...]:
    """Load the teachers of a run, if it has any. Every host calls this; raises LockstepError if hosts have different
    teachers, and as `teacher_inputs` does."""
    config = inputs.config
    if not config.teachers:
        return ()
    from tpu_grpo.run.teachers import teacher_inputs  # most runs have none

    announce(hosts, f"loading {len(config.teachers)} teachers")
    models = [spec.as_model(config.model.dtype) for spec in config.teachers]
    agreed = tuple(
        None if model is None else agreed_checkpoint(model, config.run.seed, hosts, read)
        for model, read in zip(models, inputs.teachers, strict=True)
    )
    tools = tools_of(inputs.environments)
    renderer = lambda: PromptRenderer(config.data, inputs.tokenizer, tools)  # noqa: E731
    return teacher_inputs(config.teachers, config.model.dtype, agreed, meshes, renderer)


def with_routing_replay(
    section: AlgorithmSection, model: ModelSection, rollout: RolloutSection, checkpoint: Checkpoint
) -> AlgorithmSection:
    """Set algorithm.routing_replay if it is unset; Tunix's learner has no such setting.

    It becomes true for a model with experts in bfloat16, without rollout.partial_extra: in bfloat16, engine and
    trainer can round differently, and so choose different experts of nearly equal probability. The run's files keep it
    unset.
    """
    if section.routing_replay is not None or section.tunix is not None:
        return section
    replay = checkpoint.has_experts and model.dtype == "bfloat16" and not rollout.partial_extra
    return section.model_copy(update={"routing_replay": replay})


def open_run_algorithm(section: AlgorithmSection, data: DataSection, optimizer: OptimizerSection) -> RunAlgorithm:
    """Open the run's algorithm; raises ConfigError if it cannot be used for training."""
    if section.tunix is not None:
        return addition("tunix_options").open_tunix(section, data, optimizer)
    if section.old_policy == "tunix":
        raise ConfigError(
            f"algorithm.old_policy=tunix needs algorithm.name=tunix:NAME, got {section.name}; take rollout or trainer"
        )
    return open_algorithm(section)


def learner_class(section: AlgorithmSection) -> type[Learner]:
    """Return the class of the learner: this package's, or Tunix's with algorithm.name=tunix:NAME."""
    return Learner if section.tunix is None else addition("tunix_learner").TunixLearner


def open_engines(
    options: EngineOptions,
    hosts: Hosts,
    checkpoint: Checkpoint,
    meshes: Meshes,
    section: MeshesSection,
    lora: LoraSection,
    environments: Environments | None = None,
) -> SyncedEngines:
    """Build the engines on the sampler's devices, without weights."""
    sizes = {"cache tokens": options.cache_tokens, "shapes": options.shapes}  # hosts that differ here would abort later
    hosts.agree_all({f"{name} of an engine": str(value) for name, value in sizes.items()})
    devices, tensor = meshes.sampler_devices, meshes.tensor
    slices = meshes.slices, meshes.own
    replicas = Replicas.build(checkpoint.directory, devices, tensor, options, hosts, slices)
    if environments is not None:
        divided_places(environments.places, [replica.hosts for replica in replicas.replicas])  # raises for too few
    return SyncedEngines(replicas, checkpoint.weight_rules, section, lora.alpha, hosts)


# --- what the policy learns ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What the policy is trained on: prompts, rewards, environments, and held-out prompts for evaluation."""

    prompts: PromptStream
    rewards: DistributedRewards
    held_out: "HeldOut | None"
    """None if the config has no held-out prompts."""
    environments: Environments | None = None
    """The environments of conversations; None if completions are single answers."""

    def close(self) -> None:
        """Close the rewards and environments, and end their processes."""
        self.rewards.close()
        if self.held_out is not None:
            self.held_out.close()
        if self.environments is not None:
            self.environments.close()


@dataclass(frozen=True)
class HeldOut:
    """Prompts for evaluation, with the rewards that score their completions."""

    prompts: tuple[Prompt, ...]
    rewards: DistributedRewards
    section: EvaluationSection
    temperature: float
    """The temperature of the sampled answers."""
    best: str
    """The result "mode/reward" of an evaluation, such as greedy/gsm8k, whose maximum decides which step is the best."""
    environments: Environments | None = None
    """The environments of conversations, shared with the training run if there is one; None for single answers."""

    def close(self) -> None:
        """Close the rewards and environments, and end their processes."""
        self.rewards.close()
        if self.environments is not None:
            self.environments.close()


def open_task(inputs: Inputs, algorithm: RunAlgorithm, hosts: Hosts) -> Task:
    """Open the task; each host scores a part of the completions.

    Raises:
        ConfigError: if rewards are per token, and the algorithm would spread them over all tokens.
        RewardError: if a reward needs environments, and the run has none.
        LockstepError: hosts read, generated or downloaded different prompts.
    """
    config, prompts, rewards, held_out = inputs.config, inputs.prompts, inputs.rewards, inputs.held_out
    if hosts.count > 1:
        hosts.agree_all({f"prompts of {part.name}": part.rendered.digest for part in prompts.parts})
    _check_token_rewards(config.environment, config.algorithm, rewards, algorithm, config.teachers)
    judges = [rewards] if held_out is None else [rewards, held_out.rewards]
    environments = open_environments(config.data, inputs.tokenizer, inputs.environments, judges)
    judged = None
    if held_out is not None:
        specs, temperature = config.evaluation_rewards, config.rollout.temperature
        judged = _distributed(config.evaluation, specs, temperature, held_out, environments, hosts)
    return Task(prompts, DistributedRewards(rewards, hosts, _compared(config.rewards)), judged, environments)


def open_held_out_task(config: RunConfig, tokenizer: PreTrainedTokenizerFast, hosts: Hosts) -> HeldOut | None:
    """Open only the held-out prompts, with their rewards and environments; None if the config has no such prompts."""
    loaded, specs = load_environments(config.environment, config.every_reward), config.evaluation_rewards
    rewards_for = partial(open_rewards, specs, max_steps=config.run.max_steps)
    if (held_out := open_held_out(config.evaluation, config.data, tokenizer, loaded, rewards_for)) is None:
        return None
    environments = open_environments(config.data, tokenizer, loaded, [held_out.rewards])
    return _distributed(config.evaluation, specs, config.rollout.temperature, held_out, environments, hosts)


def _distributed(
    section: EvaluationSection,
    specs: Sequence[RewardSpec],
    temperature: float,
    held_out: HeldOutInputs,
    environments: Environments | None,
    hosts: Hosts,
) -> HeldOut:
    if hosts.count > 1:
        hosts.agree_all({"prompts of the evaluation": prompts_digest(held_out.prompts)})
    return HeldOut(
        held_out.prompts,
        DistributedRewards(held_out.rewards, hosts, _compared(specs)),
        section,
        temperature if section.temperature is None else section.temperature,
        section.best or f"{GREEDY}/{specs[0].shown}",
        environments,
    )


def _check_token_rewards(
    environment: EnvironmentSection,
    section: AlgorithmSection,
    rewards: RewardSet,
    algorithm: RunAlgorithm,
    teachers: Sequence[TeacherSpec] = (),
) -> None:
    """Raise ConfigError for per-token advantages if the algorithm would spread them over all tokens."""
    credits: list[str] = []
    if rewards.token_rewards:
        credits.append(f"the rewards {list(rewards.token_rewards)} give every token its own")
    if section.learns_from_rewards and (names := [teacher.shown for teacher in teachers if teacher.weight]):
        credits.append(f"the teachers {names} give every token its own")
    if environment.is_on and environment.turn_credit == "turn":
        credits.append("environment.turn_credit=turn gives every turn its own")
    wanted = " and ".join(credits)
    if credits and section.tunix is not None:
        raise ConfigError(
            f"algorithm.name={section.name} gives all tokens of a completion one advantage, but {wanted}; leave that "
            "out, or take another algorithm"
        )
    if credits and not getattr(algorithm.objective, "credits_tokens", True):
        raise ConfigError(
            f"algorithm.name={section.name} gives all tokens of a completion one advantage, because its ratio is of "
            f"the whole completion, but {wanted}; set algorithm.options={{per_token: true}}, or take another algorithm"
        )


def _compared(specs: Sequence[RewardSpec]) -> list[str]:
    """List the deterministic rewards, whose values hosts can compare."""
    return [spec.shown for spec in specs if repeats_itself(spec)]


def open_environments(
    data: DataSection,
    tokenizer: PreTrainedTokenizerFast,
    loaded: LoadedEnvironments | None,
    judges: Sequence[RewardSet] = (),
) -> Environments | None:
    """Open the environments of a run; None if the run has none.

    ``judges`` are the rewards. If a reward reads attributes of environments, these are kept after conversations.

    Raises:
        RewardError: if a reward needs environments, and the run has none.
        ConfigError: for a chat template that cannot write tools or several turns.
    """
    asking = [name for rewards in judges for name in rewards.of_environments]
    if asking and loaded is None:
        raise RewardError(
            f"{', '.join(asking)} must have conversations with environments, got environment.name unset; set it, or "
            "take other rewards"
        )
    if loaded is None:
        return None
    keep = any(rewards.keeps_environments for rewards in judges)
    return loaded.open(tokenizer, data.max_prompt_tokens, template_switches(data, tokenizer), keep=keep)


def stop_ids(
    environment: EnvironmentSection, data: DataSection, tokenizer: PreTrainedTokenizerFast, directory: Path
) -> tuple[int, ...]:
    """Return the ids that end a completion or a turn of the run's policy, ascending.

    They are the pad token and the end tokens of the model's tokenizer, config.json and generation_config.json in
    ``directory``. For conversations, the chat template's turn-end tokens are added: a base model's end token differs
    from them.

    Raises:
        CheckpointError: for a broken file of the model.
        ConfigError: for conversations with a chat template that does not end turns.
    """
    ids = {*stop_token_ids(tokenizer, directory)}
    if environment.is_on:
        ids.update(addition("chat_format").turn_ends(tokenizer, template_switches(data, tokenizer)))
    return tuple(sorted(ids))


def evaluate_policy(sampler: Sampler, held_out: HeldOut, step: int) -> tuple[Evaluation, Sequence[EvaluationSamples]]:
    """Evaluate the policy in the sampler's engines; returns the estimates, and the samples they are based on."""
    begin, prompts, section = held_out.rewards.begin, held_out.prompts, held_out.section
    return evaluate(sampler.answer, begin, prompts, section, held_out.temperature, voted_answer, step=step)


@contextmanager
def built_for_good() -> Iterator[None]:
    """Exclude the objects that exist before the block from garbage collection during it.

    Python collects old objects only once there are a quarter as many new ones. Half a million objects exist before the
    first step, so the cyclic garbage of hundreds of steps would pile up in memory before it is collected.
    """
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own, in place of those of a start
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def give_back_memory() -> None:
    """Make glibc return freed memory to the system; each save leaves megabytes of it between blocks in use."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # other C libraries have none
        trim(0)
