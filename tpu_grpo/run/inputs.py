"""Opens and checks what a run reads: model, environments, rewards and prompts. Runs once, before jax is imported.

Quick checks come first, so that a typing error is reported quickly: the files of model and data are checked before the
tokenizer library is imported.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_grpo.config import DataSection, EvaluationSection, ModelSection, RewardSpec, RunConfig
from tpu_grpo.config.plugins import addition
from tpu_grpo.data.stream import PromptStream, columns_at_a_glance, open_evaluation_prompts, open_prompts
from tpu_grpo.hosts import Hosts
from tpu_grpo.models.checkpoint import Checkpoint, check_tokenizer_files, read_checkpoint
from tpu_grpo.models.families.rope import YarnScaling
from tpu_grpo.models.tasks import TASKS
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Prompt
from tpu_grpo.rewards import RewardSet, open_rewards
from tpu_grpo.run.conversations import LoadedEnvironments, load_environments, tools_of
from tpu_grpo.run.fingerprints import model_fingerprints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class HeldOutInputs:
    """Prompts for evaluation, with the rewards that score their completions."""

    prompts: tuple[Prompt, ...]
    rewards: RewardSet


@dataclass(frozen=True)
class Inputs:
    """The opened inputs of a run; reward processes start when they are first needed."""

    config: RunConfig
    """The run's config, with run.epochs converted to run.max_steps."""
    checkpoint: Checkpoint | None
    """None for a built-in model, which is trained on its task later, when the run's parts are built."""
    tokenizer: "PreTrainedTokenizerFast"
    environments: LoadedEnvironments | None
    """None if completions are single answers."""
    prompts: PromptStream
    rewards: RewardSet
    held_out: HeldOutInputs | None
    """None if the config has no held-out prompts."""
    teachers: "tuple[Checkpoint | None, ...]" = ()
    """The models of the teachers, see `read_teachers` in tpu_grpo/run/teachers.py."""
    teacher_notes: tuple[str, ...] = ()
    """Messages about the teachers, for the user at the start of a run."""


def open_inputs(config: RunConfig, reading: Callable[[], None] = lambda: None) -> Inputs:
    """Open and check all that a run reads; ``reading`` is called after quick checks, before the data is read whole.

    Raises:
        ConfigError: for templates, columns and settings that do not fit data, tokenizer or model, and for a needed
            library that is not installed.
        CheckpointError: for a model or tokenizer that is missing, broken or not supported.
        DataError: for data that is missing or malformed, or prompts that are empty or too long.
        RewardError: for a reward that cannot be loaded, or does not fit the data.
        EpisodeError: for an environment that cannot be found, or whose class is not an environment.
    """
    if config.logging.has_trackers:
        from tpu_grpo.observe.trackers import check_trackers

        check_trackers(config.logging)
    if config.logging.against is not None:
        addition("published").read_published(config.logging.against)
    if (checkpoint := read_model(config.model)) is not None:
        check_model(config, checkpoint)
    teachers, check_teachers = tuple[Checkpoint | None, ...](), None
    if config.teachers:
        from tpu_grpo.run.teachers import check_teachers, read_teachers  # most runs have none

        teachers = read_teachers(config.teachers, config.model, config.data, config.rollout)
    environments = load_environments(config.environment, config.every_reward)
    columns, held_columns = columns_at_a_glance(config.data, config.evaluation)
    if config.run.epochs is not None:  # rewards may need the number of steps, which depends on the data
        columns = held_columns = None
    rewards = None if columns is None else _open_rewards(config.rewards, environments, columns, config.run.max_steps)

    def held_rewards_for(columns: Collection[str]) -> RewardSet:
        if config.evaluation.rewards is None and rewards is not None:  # share the processes of the run's rewards
            return rewards.for_columns(columns)
        return open_rewards(config.evaluation_rewards, columns, config.run.max_steps)

    held_rewards = None if held_columns is None else held_rewards_for(held_columns)
    reading()
    tokenizer, tools = open_tokenizer(config.model, checkpoint), tools_of(environments)
    prompts = open_prompts(config.data, config.run.seed, tokenizer, tools)
    config = config.counted(prompts.size)
    given = {"data": config.data, "beta": config.algorithm.beta}
    notes = check_teachers(config.teachers, teachers, tokenizer, prompts.columns, **given) if check_teachers else ()
    rewards = rewards or _open_rewards(config.rewards, environments, prompts.columns, config.run.max_steps)
    opened = held_rewards_for if held_rewards is None else lambda _: held_rewards
    held_out = open_held_out(config.evaluation, config.data, tokenizer, environments, opened)
    return Inputs(config, checkpoint, tokenizer, environments, prompts, rewards, held_out, teachers, notes)


def open_held_out(
    section: EvaluationSection,
    data: DataSection,
    tokenizer: "PreTrainedTokenizerFast",
    environments: LoadedEnvironments | None,
    rewards_for: Callable[[Collection[str]], RewardSet],
) -> HeldOutInputs | None:
    """Open the held-out prompts and their rewards; None if the config has none. Raises as `open_inputs` does.

    ``rewards_for`` returns the rewards of held-out prompts that have these columns.
    """
    prompts = open_evaluation_prompts(section, data, tokenizer, tools_of(environments))
    if prompts is None:
        return None
    columns = tuple(prompts[0].columns)
    if environments is not None:
        environments.check_columns(columns)
    return HeldOutInputs(prompts, rewards_for(columns))


def _open_rewards(
    specs: Sequence[RewardSpec], environments: LoadedEnvironments | None, columns: Collection[str], steps: int
) -> RewardSet:
    if environments is not None:
        environments.check_columns(columns)
    return open_rewards(specs, columns, steps)


# --- the model -------------------------------------------------------------------------------------------------------


def read_model(model: ModelSection) -> Checkpoint | None:
    """Check from file headers that the model is complete and supported; of a built-in model, only check its name.

    Raises:
        CheckpointError: for files that are missing or broken, and for a model that is not supported.
        ConfigError: for a built-in model that does not exist.
    """
    if model.builtin is not None:
        builtin_task(model)
        return None
    from tpu_grpo.models.fetching import model_directory  # only needed here

    checkpoint = read_checkpoint(model_directory(model))
    check_tokenizer_files(checkpoint.directory)
    return checkpoint


def builtin_task(model: ModelSection) -> str:
    """Return the name of the task that a built-in model is trained on; raises ConfigError if there is none."""
    if (name := model.builtin) is None or name not in TASKS:
        raise ConfigError(f"model.path={model.path} is not built in; built in: {list(TASKS)}")
    return name


def check_context(checkpoint: Checkpoint, prompt_tokens: int, new_tokens: int) -> None:
    """Raise ConfigError if the longest prompt and its longest completion together exceed the model's context."""
    longest, scaling = checkpoint.hf_config.get("max_position_embeddings"), checkpoint.config.scaling
    if longest is not None and isinstance(scaling, YarnScaling):  # ``longest`` is the context before scaling
        longest = max(longest, int(scaling.factor * scaling.original_max_position_embeddings))
    if longest is not None and prompt_tokens + new_tokens > longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens must be <= {longest}, the model's context, got "
            f"{prompt_tokens} + {new_tokens}; shorten one of them"
        )


def check_model(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Check that the model can do what the config asks of it. Raises ConfigError if sequences exceed the model's
    context, or the model lacks modules, layers or experts."""
    check_context(checkpoint, config.data.max_prompt_tokens, config.rollout.max_new_tokens)
    if config.algorithm.routing_replay and not checkpoint.has_experts:
        raise ConfigError(
            f"algorithm.routing_replay=true needs a model with experts, got a {checkpoint.family.model_type}; leave it "
            "out"
        )
    if config.model.lora.rank is None and config.model.train_layers is None:
        return
    from tpu_grpo.models.lora import adapted_modules, existing_layers  # only needed here

    if config.model.lora.rank is not None:
        adapted_modules(checkpoint, config.model.lora)
        if checkpoint.family.is_fused and config.export.kind == "adapter":
            raise ConfigError(
                f"export.kind must be model for {checkpoint.family.model_type}, got adapter; its checkpoints hold "
                "projections as one, to which PEFT cannot give the adapters of each"
            )
        if checkpoint.left_out and config.export.kind == "adapter":
            raise ConfigError(
                "export.kind must be model, got adapter: adapters of the text model do not fit the checkpoint, whose "
                "modules have other names because it also sees images; an exported model is a text model"
            )
    if config.model.train_layers is not None:
        existing_layers(checkpoint, "model.train_layers", config.model.train_layers)


def open_tokenizer(model: ModelSection, checkpoint: Checkpoint | None) -> "PreTrainedTokenizerFast":
    """Open the tokenizer of the model that `read_model` returned; works before a built-in model has been trained.
    Raises CheckpointError for a tokenizer that is missing, broken, without an end token, or larger than the model."""
    from tpu_grpo.models.tokenizers import builtin_tokenizer, load_tokenizer  # a second to import

    if checkpoint is None:
        return builtin_tokenizer(TASKS[builtin_task(model)])
    return load_tokenizer(checkpoint.directory, checkpoint.config.vocab_size)


def open_model(model: ModelSection, seed: int, hosts: Hosts) -> "tuple[Checkpoint, PreTrainedTokenizerFast]":
    """Open the checkpoint and its tokenizer; raises as `read_model` and `open_tokenizer` do. Every host calls this, and
    `check_model`."""
    read = read_model(model)
    return agreed_checkpoint(model, seed, hosts, read), open_tokenizer(model, read)


def agreed_checkpoint(model: ModelSection, seed: int, hosts: Hosts, read: Checkpoint | None) -> Checkpoint:
    """Return the checkpoint, after a check that all hosts have the same model; a missing built-in model is trained now,
    with the run's ``seed``.

    Every host calls this; ``read`` is the result of `read_model`.

    Raises:
        LockstepError: hosts have different models.
    """
    if read is not None:
        if model.hub is not None:
            hosts.agree("the revision of the model", read.directory.name)
        return read
    from tpu_grpo.models.builtin import builtin_checkpoint  # imports jax

    directory = builtin_checkpoint(builtin_task(model), seed, progress=True)
    if hosts.count > 1:
        hosts.agree_all(model_fingerprints(directory))
    return read_checkpoint(directory)
