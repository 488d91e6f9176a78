"""Opens and checks what a run reads: model, environments, rewards and prompts. Runs once, before jax is imported.

Quick checks come first, so that a typing error is reported quickly: the files of model and data are checked before the
tokenizer library is imported.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_grpo.config import ModelSection, RunConfig
from tpu_grpo.config.plugins import addition
from tpu_grpo.data.stream import PromptStream, columns_at_a_glance, open_evaluation_prompts, open_prompts
from tpu_grpo.hosts import Hosts
from tpu_grpo.models.checkpoint import Checkpoint, check_tokenizer_files, read_checkpoint
from tpu_grpo.models.families.rope import YarnScaling
from tpu_grpo.models.fetching import model_directory
from tpu_grpo.models.lora import adapted_modules, existing_layers
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
    checkpoint = read_model(config)
    environments = load_environments(config)
    columns, held_columns = columns_at_a_glance(config.data, config.evaluation)
    if config.run.epochs is not None:  # rewards may need the number of steps, which depends on the data
        columns = held_columns = None
    rewards = None if columns is None else _open_rewards(config, environments, columns)
    held_rewards = None if held_columns is None else _rewards_of_evaluation(config, held_columns, rewards)
    reading()
    tokenizer, tools = open_tokenizer(config.model, checkpoint), tools_of(environments)
    prompts = open_prompts(config.data, config.run.seed, tokenizer, tools)
    config = config.counted(prompts.size)
    rewards = rewards or _open_rewards(config, environments, prompts.columns)
    held_out = open_held_out(config, tokenizer, environments, held_rewards, rewards)
    return Inputs(config, checkpoint, tokenizer, environments, prompts, rewards, held_out)


def open_held_out(
    config: RunConfig,
    tokenizer: "PreTrainedTokenizerFast",
    environments: LoadedEnvironments | None,
    rewards: RewardSet | None = None,
    of_run: RewardSet | None = None,
) -> HeldOutInputs | None:
    """Open the held-out prompts and their rewards; None if the config has none. Raises as `open_inputs` does.

    ``rewards`` are the rewards of the held-out prompts, and ``of_run`` the run's; each is None if it is not open yet.
    """
    prompts = open_evaluation_prompts(config.evaluation, config.data, tokenizer, tools_of(environments))
    if prompts is None:
        return None
    columns = tuple(prompts[0].columns)
    if environments is not None:
        environments.check_columns(columns)
    return HeldOutInputs(prompts, rewards or _rewards_of_evaluation(config, columns, of_run))


def _open_rewards(config: RunConfig, environments: LoadedEnvironments | None, columns: Collection[str]) -> RewardSet:
    if environments is not None:
        environments.check_columns(columns)
    return open_rewards(config.rewards, columns, config.run.max_steps)


def _rewards_of_evaluation(config: RunConfig, columns: Collection[str], of_run: RewardSet | None) -> RewardSet:
    """Open the rewards for held-out prompts; if they are the run's own, share its reward processes."""
    if config.evaluation.rewards is None and of_run is not None:
        return of_run.for_columns(columns)
    return open_rewards(config.evaluation_rewards, columns, config.run.max_steps)


# --- the model -------------------------------------------------------------------------------------------------------


def read_model(config: RunConfig) -> Checkpoint | None:
    """Check from file headers that the model is complete and supported; of a built-in model, only check its name.

    Raises:
        CheckpointError: for files that are missing or broken, and for a model that is not supported.
        ConfigError: for a built-in model that does not exist, and settings that the model does not support.
    """
    if config.model.builtin is not None:
        builtin_task(config.model)
        return None
    checkpoint = read_checkpoint(model_directory(config.model))
    check_model(config, checkpoint)
    check_tokenizer_files(checkpoint.directory)
    return checkpoint


def builtin_task(model: ModelSection) -> str:
    """Return the name of the task that a built-in model is trained on; raises ConfigError if there is none."""
    if (name := model.builtin) is None or name not in TASKS:
        raise ConfigError(f"model.path={model.path} is not built in; built in: {list(TASKS)}")
    return name


def check_model(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Check that the model can do what the config asks of it. Raises ConfigError if sequences exceed the model's
    context, or the model lacks modules, layers or experts."""
    longest, scaling = checkpoint.hf_config.get("max_position_embeddings"), checkpoint.config.scaling
    if longest is not None and isinstance(scaling, YarnScaling):  # ``longest`` is the context before scaling
        longest = max(longest, int(scaling.factor * scaling.original_max_position_embeddings))
    if longest is not None and config.context_tokens > longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens must be <= {longest}, the model's context, got "
            f"{config.data.max_prompt_tokens} + {config.rollout.max_new_tokens}; shorten one of them"
        )
    if config.algorithm.routing_replay and not checkpoint.has_experts:
        raise ConfigError(
            f"algorithm.routing_replay=true needs a model with experts, got a {checkpoint.family.model_type}; leave it "
            "out"
        )
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


def open_model(config: RunConfig, hosts: Hosts) -> "tuple[Checkpoint, PreTrainedTokenizerFast]":
    """Open the checkpoint and its tokenizer; raises as `read_model` and `open_tokenizer` do. Every host calls this."""
    read = read_model(config)
    return agreed_checkpoint(config, hosts, read), open_tokenizer(config.model, read)


def agreed_checkpoint(config: RunConfig, hosts: Hosts, read: Checkpoint | None) -> Checkpoint:
    """Return the checkpoint, after a check that all hosts have the same model; a missing built-in model is trained now.

    Every host calls this; ``read`` is the result of `read_model`.

    Raises:
        LockstepError: hosts have different models.
    """
    if read is not None:
        if config.model.hub is not None:
            hosts.agree("the revision of the model", read.directory.name)
        return read
    from tpu_grpo.models.builtin import builtin_checkpoint  # imports jax

    directory = builtin_checkpoint(builtin_task(config.model), config.run.seed, progress=True)
    if hosts.count > 1:
        hosts.agree_all(model_fingerprints(directory))
    checkpoint = read_checkpoint(directory)
    check_model(config, checkpoint)
    return checkpoint
