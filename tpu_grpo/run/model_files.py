"""The files of a run's model: where they are, and whether the model can do what the config asks of it, without jax.

checkpoint = read_model(config)                    # None for a built-in model, which is taught when it is needed
checkpoint, tokenizer = open_model(config, hosts)  # whatever the model is
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_grpo.config import BUILTIN, HUB, RunConfig
from tpu_grpo.hosts import Hosts
from tpu_grpo.models.checkpoint import Checkpoint, read_checkpoint
from tpu_grpo.models.fetching import fetch
from tpu_grpo.models.lora import adapted_modules, existing_layers
from tpu_grpo.records.errors import CheckpointError, ConfigError
from tpu_grpo.run.fingerprints import model_fingerprints
from tpu_grpo.tasks import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def read_model(config: RunConfig) -> Checkpoint | None:
    """See that the model is there, whole and supported, from the headers of its files; a built-in one by its name.

    Raises:
        CheckpointError: for files that are missing or broken, and for a model that is not supported.
        ConfigError: for a built-in model that there is not, and settings that the model cannot follow.
    """
    if config.model.path.startswith(BUILTIN):
        builtin_name(config)
        if config.model.pad_token is not None:
            raise ConfigError(
                f"model.pad_token is for models of your own, got {config.model.pad_token!r} with a built-in one, which "
                "has a padding token; leave it out"
            )
        return None
    checkpoint = read_checkpoint(model_directory(config))
    check_model(config, checkpoint)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        if not (checkpoint.directory / name).is_file():
            raise CheckpointError(
                f"a checkpoint directory must hold {name}, not found in {checkpoint.directory}; copy it from the "
                "model's publisher, or write it with transformers' save_pretrained of a fast tokenizer"
            )
    return checkpoint


def builtin_name(config: RunConfig) -> str:
    """Return the name in a model.path that begins with BUILTIN: that of the task that the model is taught on.

    Raises:
        ConfigError: if there is no built-in model of that name.
    """
    name = config.model.path.removeprefix(BUILTIN)
    if name not in TASKS:
        raise ConfigError(f"model.path={config.model.path} is not built in; built in: {list(TASKS)}")
    return name


def model_directory(config: RunConfig) -> Path:
    """Return the directory of a model that is not built in; one of the hub is fetched if it is not here."""
    path = config.model.path
    if not path.startswith(HUB):
        return Path(path).expanduser()
    return fetch(path.removeprefix(HUB), lambda what: print(what, file=sys.stderr, flush=True))


def check_model(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Check that the model can do what the config asks of it.

    Raises:
        ConfigError: if sequences are longer than the model takes, or if it lacks modules, layers or experts.
    """
    longest = checkpoint.hf_config.get("max_position_embeddings")
    if longest is not None and config.context_tokens > longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens must be <= {longest}, the model's context, got "
            f"{config.data.max_prompt_tokens} + {config.rollout.max_new_tokens}; shorten one of them"
        )
    for_experts = {
        "algorithm.routing_replay=true": config.algorithm.routing_replay,
        "rollout.experts=fused": config.rollout.experts == "fused",
    }
    if not checkpoint.has_experts and (asked := [setting for setting, is_set in for_experts.items() if is_set]):
        raise ConfigError(f"{asked[0]} needs a model with experts, got a {checkpoint.family.model_type}; leave it out")
    if config.model.lora.rank is not None:
        adapted_modules(checkpoint, config.model.lora)
    if config.model.train_layers is not None:
        existing_layers(checkpoint, "model.train_layers", config.model.train_layers)


def open_tokenizer(config: RunConfig, checkpoint: Checkpoint | None) -> "PreTrainedTokenizerFast":
    """Open the tokenizer of the model that `read_model` returned; a built-in one need not have been taught.

    Raises:
        CheckpointError: for a tokenizer that is missing, broken or without an end or padding token.
    """
    from tpu_grpo.models.tokenizers import builtin_tokenizer, load_tokenizer  # a second to import

    if checkpoint is None:
        return builtin_tokenizer(TASKS[builtin_name(config)])
    return load_tokenizer(checkpoint.directory, config.model.pad_token)


def open_model(config: RunConfig, hosts: Hosts) -> "tuple[Checkpoint, PreTrainedTokenizerFast]":
    """Open the checkpoint and its tokenizer; raises as `read_model` and `open_tokenizer` do. Every host calls this."""
    read = read_model(config)
    return agreed_checkpoint(config, hosts, read), open_tokenizer(config, read)


def agreed_checkpoint(config: RunConfig, hosts: Hosts, read: Checkpoint | None) -> Checkpoint:
    """See that hosts have the same checkpoint; one without the built-in model trains it now.

    Args:
        config: the run.
        hosts: its processes; every one of them calls this.
        read: what `read_model` returned.

    Raises:
        LockstepError: hosts have different models.
    """
    if read is not None:
        if config.model.path.startswith(HUB):
            hosts.agree("the revision of the model", read.directory.name)
        return read
    from tpu_grpo.models.builtin import builtin_checkpoint  # with jax

    directory = builtin_checkpoint(builtin_name(config), config.run.seed, progress=True)
    if hosts.count > 1:
        hosts.agree_all(model_fingerprints(directory))
    checkpoint = read_checkpoint(directory)
    check_model(config, checkpoint)
    return checkpoint
