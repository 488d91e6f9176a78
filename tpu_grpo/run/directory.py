"""Prepares the directory that a run leaves its files in: it is made, continued, or moved aside, never overwritten."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_grpo.config import RunConfig
from tpu_grpo.errors import ConfigError, DataError
from tpu_grpo.hosts import Hosts
from tpu_grpo.metrics.jsonl import write_json
from tpu_grpo.metrics.run_files import CONFIG_FILE, DATA_FILE


def prepare_run_dir(config: RunConfig) -> Path | None:
    """Create ``run.dir`` and write the resolved config into it.

    With ``checkpoint.resume=never`` the files of an earlier run are moved to the first free ``<dir>.1``, ``<dir>.2``...

    Returns:
        Where earlier files were moved, or None.

    Raises:
        ConfigError: if the directory cannot be made or written, or would have to be moved from under this process.
    """
    directory = config.run_dir
    try:
        moved = _move_aside(directory) if config.checkpoint.resume == "never" and _holds_files(directory) else None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG_FILE).write_text(config.to_yaml())
    except OSError as error:
        raise ConfigError(f"run.dir must be a directory this process can write, got {directory}: {error}") from error
    return moved


def continue_data(directory: Path, described: Mapping[str, Any], start: int, hosts: Hosts) -> None:
    """Remember what the data is, or see that a run that continues has the data it began with.

    The position in the data is the step, which means the same place only in the same prompts in the same order.
    Every host calls this, and host 0 reads and writes.

    Args:
        directory: the run's directory.
        described: what ``data.json`` says about the prompts, among it their ``digest``.
        start: how many steps are done already, 0 for a new run.
        hosts: the processes of the run.

    Raises:
        DataError: for other data than before, on every host.
    """
    path = directory / DATA_FILE
    before = path.read_bytes() if hosts.is_first and start and path.exists() else b""
    before = hosts.broadcast("the data of the run", before)
    if before and (was := json.loads(before)["digest"]) != described["digest"]:
        raise DataError(
            f"a run must go on with the prompts it began with, in order; by {path} their digest was {was[:9]}..., "
            f"now it is {described['digest'][:9]}...: restore the data, data.*, run.seed and the tokenizer, or start "
            f"over with checkpoint.resume=never, or remove {path} to read on in other data after step {start}"
        )
    if hosts.is_first and not before:
        write_json(path, described)


def _holds_files(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _move_aside(directory: Path) -> Path:
    if Path.cwd().is_relative_to(directory.resolve()):
        raise ConfigError(
            f"run.dir must not hold the working directory with checkpoint.resume=never, which moves earlier files "
            f"aside, got {directory}; name a directory of the run's own"
        )
    if not (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"run.dir holds files that are no run's (no {CONFIG_FILE} among them), got {directory}, and "
            "checkpoint.resume=never would move them aside; name a directory of the run's own"
        )
    number = 1
    while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    return directory.rename(aside)
