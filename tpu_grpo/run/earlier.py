"""What lies in ``run.dir`` before a run starts there, and what that means for it; nothing is written here.

never           an earlier run makes room, or nothing is there
auto, require   the run that lies there goes on, is done, or was another one, and then this one is refused
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_grpo.config import RunConfig, load_config
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.run_files import (
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    LOCK_FILE,
    METRICS_FILE,
    SOURCES_FILE,
    SUMMARY_FILE,
    saved_steps,
)
from tpu_grpo.records.errors import CheckpointError, ConfigError, DataError
from tpu_grpo.run.changes import Change, changed_settings, changed_sources, sources
from tpu_grpo.run.lock import holder, taken
from tpu_grpo.run.sharing import first_does


def finished(config: RunConfig, hosts: Hosts) -> dict[str, Any] | None:
    """Return the summary of a run that has nothing left to do, and is to be continued; None for any other.

    Every host calls this. No file is touched, and jax is not imported on one host.

    Raises:
        ConfigError: on every host, for a directory that another process has, and for a run that lies there and cannot
            be compared with this one.
    """
    return first_does(hosts, "whether the run is done", lambda: _finished(config))


def how_it_ended(config: RunConfig, summary: dict[str, Any]) -> str:
    """Say of a finished run that it is, and what to do to go on."""
    last, steps = config.run.max_steps, summary["steps"]
    if (why := summary.get("ended_early")) and steps < last:
        return f"this run is done, after step {steps} of {last}: {why}"
    allow = ""
    if config.optimizer.schedule != "constant":
        schedule = config.optimizer.schedule
        allow = f" with checkpoint.allow_changes=[run.max_steps], because the {schedule} schedule ends there,"
    return f"this run is done: {steps} of {last} steps; set run.max_steps higher{allow} to go on, or another run.dir"


def changes_since(config: RunConfig) -> list[Change]:
    """Compare with the run that lies in ``run.dir`` and has done steps; without one there are no changes.

    Raises:
        ConfigError: for changes that make results incomparable, unless ``checkpoint.allow_changes`` names them.
    """
    directory = config.run_dir
    path = directory / CONFIG_FILE
    if not path.exists() or not _has_steps(directory):
        return []
    try:
        before = load_config(path)
    except ConfigError as error:
        raise ConfigError(
            f"{path} must be the config of the run that lies there, as this version reads it, got: {error}; give this "
            "run another run.name or run.dir, or start over with checkpoint.resume=never"
        ) from error
    known = directory / SOURCES_FILE
    files = read_json(known) if known.exists() else {}
    changed = changed_settings(before, config)
    names = {change.name for change in changed}
    changed += [change for change in changed_sources(files, sources(config)) if change.name not in names]
    _refuse(changed, config)
    return changed


def must_move(config: RunConfig) -> bool:
    """Say whether files of an earlier run have to make room for this one, and see that they can.

    Raises:
        ConfigError: for files that are no run's, and for the working directory.
    """
    directory = config.run_dir
    if config.checkpoint.resume != "never" or not directory.is_dir():
        return False
    if all(path.name == LOCK_FILE for path in directory.iterdir()):
        return False
    if Path.cwd().is_relative_to(directory.resolve()):
        raise ConfigError(
            "run.dir must not hold the working directory with checkpoint.resume=never, which moves earlier files "
            f"aside, got {directory}; name a directory of the run's own"
        )
    if not (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"run.dir holds files that are no run's (no {CONFIG_FILE} among them), got {directory}, and "
            "checkpoint.resume=never would move them aside; name a directory of the run's own"
        )
    return True


def check_required(config: RunConfig, steps: Sequence[int]) -> None:
    """See that there is a checkpoint to go on from, if there has to be.

    Raises:
        CheckpointError: there is none.
    """
    if config.checkpoint.resume == "require" and not steps:
        raise CheckpointError(
            f"checkpoint.resume=require needs a checkpoint in {config.run_dir / CHECKPOINTS_DIR}, found none; check "
            "run.dir, or use checkpoint.resume=auto"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that a run left, which holds an object.

    Raises:
        DataError: it does not.
    """
    try:
        found = json.loads(path.read_bytes())
    except ValueError:  # both a JSON and a UTF-8 error
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path} must hold a JSON object, as a run writes it, and does not; restore or remove it")
    return found


def free_name(directory: Path) -> Path:
    """Return the first of ``<dir>.1``, ``<dir>.2``, ... that is not there."""
    number = 1
    while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    return aside


def describe(config: RunConfig, hosts: Hosts) -> list[str]:
    """Say what a start would do with ``run.dir``, as lines of text; every host calls this.

    Raises:
        ConfigError: on every host, if a start would be refused.
    """
    return first_does(hosts, "what lies in run.dir", lambda: _described(config))


def _finished(config: RunConfig) -> dict[str, Any] | None:
    if (owner := holder(config.run_dir)) is not None:  # also looked for later, but then much has been imported
        raise taken(config.run_dir, owner)
    return _summary_if_done(config)


def _described(config: RunConfig) -> list[str]:
    directory = config.run_dir
    if (owner := holder(directory, guess=True)) is not None:
        raise taken(directory, owner)
    if must_move(config):
        return [f"run.dir    {directory}: an earlier run's files will be moved to {free_name(directory)}"]
    if (summary := _summary_if_done(config)) is not None:
        return [f"run.dir    {directory}: {how_it_ended(config, summary)}"]
    changed = [f"changed    {change} ({change.meaning})" for change in changes_since(config)]
    steps = saved_steps(directory / CHECKPOINTS_DIR)
    check_required(config, steps)
    goes_on = steps and config.checkpoint.resume != "never"
    what = f"the run there goes on after step {steps[-1]}" if goes_on else "a run that starts at step 1"
    return [f"run.dir    {directory}: {what}", *changed]


def _summary_if_done(config: RunConfig) -> dict[str, Any] | None:
    path = config.run_dir / SUMMARY_FILE
    if config.checkpoint.resume == "never" or not path.exists():
        return None
    changed = changes_since(config)
    summary = read_json(path)
    others_left = any(change.effect == "results" for change in changed)  # such as harder prompts
    exhausted = summary.get("ended_early") and not others_left
    return summary if exhausted or summary["steps"] >= config.run.max_steps else None


def _has_steps(directory: Path) -> bool:
    metrics = directory / METRICS_FILE
    return bool(saved_steps(directory / CHECKPOINTS_DIR)) or (metrics.exists() and metrics.stat().st_size > 0)


def _refuse(changed: Sequence[Change], config: RunConfig) -> None:
    allowed = config.checkpoint.allow_changes
    refused = [change for change in changed if change.effect == "results" and not change.is_in(allowed)]
    if not refused:
        return
    names = ", ".join(dict.fromkeys([*allowed, *(change.name for change in refused)]))
    lines = [f"a run must go on with the settings it began with, and {config.run_dir} was begun with others:"]
    raise ConfigError(
        "\n  ".join([*lines, *map(str, refused)])
        + "\nresults before and after could not be compared: give this run another run.name or run.dir, start over "
        f"with checkpoint.resume=never, or go on all the same with checkpoint.allow_changes='[{names}]'"
    )
