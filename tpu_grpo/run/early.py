"""What can be known of a run before jax is imported, which takes seconds: a typing error is answered at once.

The files of data and model, the run's directory, the columns that templates and rewards use: each is looked at as far
as this is quick. Everything is checked again, and whole, where it is opened.
"""

import os
from collections.abc import Iterator

from tpu_grpo.config import DataSection, RewardSpec, RunConfig
from tpu_grpo.data.messages import Conversation
from tpu_grpo.data.opening import with_template
from tpu_grpo.data.records import Record
from tpu_grpo.data.sources import Source, glance
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.run_files import CHECKPOINTS_DIR, saved_steps
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.rewards import load_reward
from tpu_grpo.run.earlier import changes_since, check_required, must_move
from tpu_grpo.run.environments import check_environment_columns, load_environments
from tpu_grpo.run.model import check_checkpoint
from tpu_grpo.run.sharing import first_does


def check_early(config: RunConfig, hosts: Hosts) -> None:
    """Look at everything that a run reads, and at where it writes; every host calls this.

    Raises:
        ConfigError: for templates, columns and settings that do not fit, and for a directory that cannot be written or
            holds another run.
        CheckpointError: for a model that is missing, broken or not supported, and for a checkpoint that is required.
        DataError: for data that is missing or malformed.
        RewardError: for a reward that cannot be loaded, or does not fit the data.
        EpisodeError: for an environment that cannot be found, or is not written as one.
    """
    first_does(hosts, "what lies in run.dir", lambda: _check_directory(config))
    check_inputs(config)


def check_inputs(config: RunConfig) -> None:
    """Look at everything that a run reads; raises as `check_early` does."""
    check_checkpoint(config)
    environments = load_environments(config)
    columns = _check_data(config)
    if columns is not None:
        check_environment_columns(environments, columns)
        _check_rewards(config.rewards, columns, config.run.max_steps)
    held_out = _check_held_out(config)
    if held_out is not None:
        specs = config.rewards if config.evaluation.rewards is None else config.evaluation.rewards
        _check_rewards(specs, held_out, config.run.max_steps)


def _check_directory(config: RunConfig) -> None:
    directory = config.run_dir
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = "is no directory" if not place.is_dir() else "cannot be written"
        raise ConfigError(
            f"run.dir must be a directory this process can write, got {directory}: {place} {what}; name another one"
        )
    if must_move(config):
        return
    changes_since(config)
    if config.checkpoint.resume != "never":
        check_required(config, saved_steps(directory / CHECKPOINTS_DIR))


def _check_data(config: RunConfig) -> Record | None:
    """Look at the first record of every source; returns those columns that all records will have, if they are known."""
    data, found = config.data, list[Record]()
    sources = list(_sources(config))
    for source, style in sources:
        if (record := glance(source)) is not None:
            _check_style(record, style, source.name)
            found.append(record)
    if len(found) < len(sources):
        return None
    columns = {name: value for record in found for name, value in record.items()}
    if data.curriculum is not None and data.curriculum not in columns:
        raise ConfigError(
            f"data.curriculum={data.curriculum} must be a column, the data has {', '.join(columns)}; correct it"
        )
    return columns | ({"source": ""} if data.sources else {})


def _sources(config: RunConfig) -> Iterator[tuple[Source, DataSection]]:
    """Yield every source of training prompts, and how they are written."""
    data = config.data
    if not data.sources:
        yield Source(data.path, data), data
    for index, spec in enumerate(data.sources):
        source = Source(spec.path, spec, setting=f"data.sources.{index}.path")
        yield source, with_template(data, spec.prompt_template)


def _check_held_out(config: RunConfig) -> Record | None:
    section = config.evaluation
    path = section.path if section.path is not None else config.data.builtin
    if path is None:
        return None
    source = Source(path, section, "heldout", "evaluation.path")
    if (record := glance(source)) is not None:
        _check_style(record, with_template(config.data, section.prompt_template), source.name)
    return record


def _check_style(record: Record, style: DataSection, source: str) -> None:
    Conversation(style).messages(record, f"record 0 of {source} (from 0)")


def _check_rewards(specs: tuple[RewardSpec, ...], columns: Record, max_steps: int) -> None:
    for spec in specs:
        load_reward(spec, columns, max_steps)
