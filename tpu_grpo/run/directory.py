"""Reserves ``run.dir`` for a run. An earlier run in the directory is continued or moved aside, never overwritten.

Only one run at a time may use the directory (lock.py). All hosts of the run must see the same directory; host 0 acts
for all. With ``checkpoint.resume=never``, a directory with an earlier run is renamed. With ``auto`` and ``require``,
the earlier run is continued, unless it is done. A changed setting that affects results must be in
``checkpoint.allow_changes``.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tpu_grpo.config import ARRAYS, EVERYTHING, OptimizerSection, RunConfig, RunSection, load_config
from tpu_grpo.hosts import Hosts, host_log
from tpu_grpo.observe.run_files import (
    CHANGES_FILE,
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    DATA_FILE,
    DIRECTORIES,
    END_FILE,
    FROM_WEIGHTS,
    HISTORY_FILE,
    LOCK_FILE,
    LOGS_DIR,
    METRICS_FILE,
    REPLACED_FILES,
    SOURCES_FILE,
    SUMMARY_FILE,
    saved_steps,
)
from tpu_grpo.records.errors import CheckpointError, ConfigError, DataError, LockstepError, TpuGrpoError
from tpu_grpo.records.json_files import encode_line, read_json, read_steps, replace_text, write_json
from tpu_grpo.run.fingerprints import Change, changed_settings, changed_sources, sources
from tpu_grpo.run.lock import RunLock, holder, read_owner, taken

SEEN_SECONDS = 20.0
"""A host that has not looked at the directory before must see the files of host 0 within this time."""
STALE_SECONDS = 60.0
"""Once a host has looked at a directory, NFS may show it the old content for this long."""
PAUSE = 0.5
SentError = tuple[str, str]
"""An error in the form in which host 0 sends it to the other hosts: (name of the class, message)."""


# --- what is there ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExistingRun:
    """What `RunDirectory.look` finds in ``run.dir`` before a run starts there; looking writes nothing."""

    makes_room: bool = False
    """Whether the files of an earlier run must be moved aside."""
    steps: tuple[int, ...] = ()
    """The steps that have a checkpoint to continue from, ascending."""
    changes: tuple[Change, ...] = ()
    """The settings and files that differ from those of the steps done so far."""
    summary: dict[str, Any] | None = None
    """The earlier run's summary if nothing is left to do; otherwise None."""
    refusal: SentError | None = None
    """The error that keeps this run from starting here; None if it can start."""

    def refuse(self) -> None:
        """Raise the error that keeps this run from starting here, if there is one.

        Raises:
            ConfigError: the directory cannot be written; it holds files that are not a run's or cannot be moved
                aside; or a change makes results incomparable and is not in ``checkpoint.allow_changes``.
            CheckpointError: there is no checkpoint, and ``checkpoint.resume=require``.
            DataError: for a file of the earlier run that cannot be read.
        """
        if self.refusal is not None:
            raise _received(self.refusal)

    def describe(self, directory: Path, run: RunSection, optimizer: OptimizerSection) -> list[str]:
        """Describe what a start would do with ``run.dir``, as lines of text; raises as `refuse` does."""
        self.refuse()
        if self.makes_room:
            return [f"run.dir    {directory}: an earlier run's files will be moved to {_free_name(directory)}"]
        if self.summary is not None:
            return [f"run.dir    {directory}: {how_it_ended(run, optimizer, self.summary)}"]
        what = f"the run there goes on after step {self.steps[-1]}" if self.steps else "a run that starts at step 1"
        changed = [f"changed    {change} ({change.meaning})" for change in self.changes]
        return [f"run.dir    {directory}: {what}", *changed]


def how_it_ended(run: RunSection, optimizer: OptimizerSection, summary: dict[str, Any]) -> str:
    """Return a text saying that a run is done, and how to continue it."""
    last, steps, allow = run.max_steps, summary["steps"], ""
    if (why := summary.get("ended_early")) and steps < last:
        return f"this run is done, after step {steps} of {last}: {why}"
    if optimizer.ends_with_run:
        schedule = optimizer.schedule
        allow = f" with checkpoint.allow_changes=[run.max_steps], because the {schedule} schedule ends there,"
    return f"this run is done: {steps} of {last} steps; set run.max_steps higher{allow} to go on, or another run.dir"


def _check_writable(directory: Path) -> None:
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = "is no directory" if not place.is_dir() else "cannot be written"
        raise ConfigError(
            f"run.dir must be a directory this process can write, got {directory}: {place} {what}; name another one"
        )


def _has_to_make_room(directory: Path) -> bool:
    """Return whether the directory holds files of an earlier run; raise ConfigError if they cannot be moved."""
    if not directory.is_dir() or all(path.name == LOCK_FILE for path in directory.iterdir()):
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


def _has_begun(directory: Path) -> bool:
    """Whether a run in the directory has done a step."""
    metrics = directory / METRICS_FILE
    return (directory / CONFIG_FILE).exists() and metrics.exists() and metrics.stat().st_size > 0


def _earlier_config(directory: Path) -> RunConfig | None:
    """Read the config of the run in the directory; None if it has none."""
    path = directory / CONFIG_FILE
    try:
        return load_config(path) if path.exists() else None
    except ConfigError as error:
        raise ConfigError(
            f"{path} must be the config of the run that lies there, as this version reads it, got: {error}; give this "
            "run another run.name or run.dir, or start over with checkpoint.resume=never"
        ) from error


def _checked_changes(
    directory: Path,
    steps: Sequence[int],
    changed: Sequence[Change],
    here: Mapping[str, Mapping[str, str]],
    allowed: Sequence[str],
) -> tuple[Change, ...]:
    """Add to the ``changed`` settings the files that differ from the earlier run's, of which ``steps`` have
    checkpoints; refuse changes that make results incomparable.

    ``here`` are the `sources` of this run, and ``allowed`` the names in checkpoint.allow_changes.
    """
    path = directory / SOURCES_FILE
    earlier = _sources_in(path) if path.exists() else {}
    names = {change.name for change in changed}
    changed = [*changed, *(change for change in changed_sources(earlier, here) if change.name not in names)]
    records = {CONFIG_FILE: [EVERYTHING], SOURCES_FILE: list(here), DATA_FILE: ["data"]} if steps else {}
    missing = [(file, name) for file, of_file in records.items() if not (directory / file).exists() for name in of_file]
    changed += [Change(name, f"unknown, as {file} is missing", "as given now", "results") for file, name in missing]
    if refused := [change for change in changed if change.effect == "results" and not change.is_in(allowed)]:
        names = [*allowed, *(change.name for change in refused)]
        names = [EVERYTHING] if EVERYTHING in names else list(dict.fromkeys(names))
        remedy = f"or go on all the same with checkpoint.allow_changes='[{', '.join(names)}]'"
        if steps and (other := [change.name for change in refused if change.is_in(ARRAYS)]):
            remedy = f"or, as no checkpoint goes on with another {' and '.join(other)}, {FROM_WEIGHTS}"
        why = "was begun with others" if not missing else "lacks files that say so, and nothing can be compared"
        lines = [f"a run must go on with the settings it began with, and {directory} {why}:"]
        raise ConfigError(
            "\n  ".join([*lines, *map(str, refused)])
            + "\nresults before and after could not be compared: give this run another run.name or run.dir, start over "
            f"with checkpoint.resume=never, {remedy}"
        )
    return tuple(changed)


def _sources_in(path: Path) -> dict[str, dict[str, str]]:
    found = read_json(path)
    if not all(
        isinstance(files, dict) and all(isinstance(what, str) for what in files.values()) for files in found.values()
    ):
        raise DataError(f"{path} must hold a digest by setting and file, and does not; restore or remove it")
    return found


def _how_it_broke_off(directory: Path) -> list[str]:
    """Return a line that says how the earlier run failed or crashed; [] if it was done, was stopped, or never began."""
    end: dict[str, Any] = {}
    if not (directory / DATA_FILE).exists():
        return []
    if (path := directory / END_FILE).exists():
        with contextlib.suppress(DataError):  # the report shows that the file is broken
            end = read_json(path, outcome=str, message=str)
    match end.get("outcome"):
        case "done" | "stopped":
            return []
        case "failed":
            return [f"before, the run failed: {end['message']}"]
        case _:
            return [
                "before, the run ended without a word: host 0 was killed, lost its machine, or ran out of memory, or a "
                f"reward with workers: 0 ended its process; {directory / LOGS_DIR} shows in which stage"
            ]


def _free_name(directory: Path) -> Path:
    """Return the first of ``<dir>.1``, ``<dir>.2``, ... that does not exist."""
    number = 1
    while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    return aside


# --- the directory of a run ------------------------------------------------------------------------------------------


class RunDirectory:
    """Holds ``run.dir`` for one run during a ``with`` block, which every host enters; host 0 takes the lock for all.

    The files of an earlier run, even if that run is continued, stay unchanged until ``begin``.

    Raises, on every host:
        ConfigError: another run uses the directory; the directory cannot be created or written, a host does not see it,
            or it would be moved aside but contains the working directory; or its run had other settings that affect
            results.
        CheckpointError: there is no checkpoint, and ``checkpoint.resume=require``.
        LockstepError: hosts see different checkpoints.
    """

    def __init__(self, config: RunConfig, hosts: Hosts):
        self.path = config.run_dir
        self.saved_steps: tuple[int, ...] = ()
        """The steps that have a checkpoint to continue from, ascending, the same on every host."""
        self._config, self._hosts = config, hosts
        self._moves = False
        """Whether the directory holds an earlier run that will be moved aside."""
        self._changes: tuple[Change, ...] = ()
        """What differs from the run that is continued; known on host 0 only."""
        self._made = False
        """Whether host 0 has made the directory."""
        self._lock: RunLock | None = None
        self._place: os.stat_result | None = None  # identifies the directory itself, wherever it is now
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._release)
            token = self._first_does("run directory", str, self._take)
            check_shared(self.path, token, self._hosts, SEEN_SECONDS)
            if self._config.checkpoint.resume != "never":
                self.saved_steps = _agreed_steps(self.path / CHECKPOINTS_DIR, self._hosts)
            self._moves = self._first_does("what lies in run.dir now", bool, self._look_again)
            if not self._moves:
                stack.enter_context(host_log(self.path / LOGS_DIR, self._hosts.index))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def look(self, *, guess: bool = False) -> ExistingRun:
        """Inspect the content of ``run.dir`` without locking it, or importing jax. Every host calls this, outside of
        the ``with`` block, and host 0 looks.

        With ``guess``, also refuse a directory that a process on another machine seems to hold, without waiting to be
        sure.

        Raises:
            ConfigError: on every host, for a directory that another process holds.
        """

        def look_for_all() -> ExistingRun:
            if (owner := holder(self.path, guess=guess)) is not None:  # `take` would raise, too, after slow imports
                raise taken(self.path, owner)
            return self._existing_run()

        return first_does(self._hosts, "what lies in run.dir", ExistingRun, look_for_all)

    def _existing_run(self) -> ExistingRun:
        config, directory = self._config, self.path
        try:
            if config.checkpoint.resume == "never":
                _check_writable(directory)
                return ExistingRun(makes_room=_has_to_make_room(directory))
            steps, changes = saved_steps(directory / CHECKPOINTS_DIR), ()
            if steps or _has_begun(directory):
                before, ends = _earlier_config(directory), config.optimizer.ends_with_run
                changed = before and changed_settings(before.values(), config.values(), rate_ends_with_run=ends)
                here, allowed = self._sources(), config.checkpoint.allow_changes
                changes = _checked_changes(directory, steps, changed or (), here, allowed)
            if (path := directory / SUMMARY_FILE).exists():
                summary = read_json(path, steps=int)
                others_left = any(change.effect == "results" for change in changes)  # new prompts allow more steps
                exhausted = summary.get("ended_early") and not others_left
                if exhausted or summary["steps"] >= config.run.max_steps:
                    return ExistingRun(steps=steps, changes=changes, summary=summary)
            _check_writable(directory)
            paths = map(directory.joinpath, DIRECTORIES)
            if others := [path for path in paths if os.path.lexists(path) and not path.is_dir()]:
                raise ConfigError(f"{others[0]} must be a directory, as runs make it, got something else; move it away")
            if others := [path for path in map(directory.joinpath, REPLACED_FILES) if path.is_dir()]:
                raise ConfigError(f"{others[0]} must be a file, as runs write it, got a directory; move it away")
            if config.checkpoint.resume == "require" and not steps:
                raise CheckpointError(
                    f"checkpoint.resume=require needs a checkpoint in {directory / CHECKPOINTS_DIR}, found none; check "
                    "run.dir, or use checkpoint.resume=auto"
                )
            return ExistingRun(steps=steps, changes=changes)
        except TpuGrpoError as error:
            return ExistingRun(refusal=_sent(error))

    def _sources(self) -> dict[str, dict[str, str]]:
        config = self._config
        return sources(config.plugins, config.model, config.algorithm, config.teachers)

    def begin(self, start: int, data: Mapping[str, Any]) -> list[str]:
        """Move an earlier run aside if necessary, and record this run's config and data; call this after all checks.

        ``start`` is the number of steps done. ``data`` describes the prompts, with their ``digest``, for ``data.json``.
        Returns lines for the console: where files were moved, and which settings and files have changed.

        Raises:
            DataError: on every host, if the data has changed, unless ``checkpoint.allow_changes`` names ``data``.
        """
        notes = self._first_does("how the run ended before", list[str], lambda: _how_it_broke_off(self.path))
        if self._moves:
            moved, token = self._first_does("moving an earlier run's files", tuple[str, str], self._move_aside)
            check_shared(self.path, token, self._hosts, STALE_SECONDS)
            self._stack.enter_context(host_log(self.path / LOGS_DIR, self._hosts.index))
            notes += [f"an earlier run's files were moved to {moved}"]
        return notes + self._first_does("the record of the run", list[str], lambda: self._record(start, data))

    def is_ours(self) -> bool:
        """Whether the path leads to the directory of this process, host 0; False if it is gone, replaced or taken."""
        try:
            owner = read_owner(self.path / LOCK_FILE)
        except (OSError, ConfigError):  # there is no lock file: this process released it, or somebody removed it
            return self._place is not None and self.path.is_dir() and os.path.samestat(self._place, self.path.stat())
        return self._lock is not None and owner is not None and owner.token == self._lock.owner.token

    def set_up_apart(self, data: Mapping[str, Any]) -> str:
        """Make a directory beside the path, with the records that a continued run reads, and return its name."""
        self.path = _free_name(self.path)
        self.path.mkdir(parents=True)
        self._record(0, data)
        return str(self.path)

    def _take(self) -> str:
        self._made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock, self._place = RunLock.take(self.path), self.path.stat()
        return self._lock.owner.token

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        if self._made and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def _look_again(self) -> bool:
        """Return whether an earlier run must be moved aside; write the config into a directory without a run.

        The second look is needed because another run may have used the directory before this process had the lock.
        """
        seen = self._existing_run()
        seen.refuse()
        self._changes = seen.changes
        if not seen.makes_room and not (self.path / CONFIG_FILE).exists():
            self._write_config()
        return seen.makes_room

    def _move_aside(self) -> tuple[str, str]:
        """Rename the directory, and lock a new directory in its place; returns (renamed directory, lock's token)."""
        assert self._lock is not None
        before, aside = self._lock, _free_name(self.path)
        before.stop_beating()
        self.path.rename(aside)
        self._lock = None
        try:
            token = self._take()
        finally:
            before.release(aside / LOCK_FILE)
        self._write_config()  # first: after a kill the directory must still look like a run's
        return str(aside), token

    def _record(self, start: int, data: Mapping[str, Any]) -> list[str]:
        """Write the run's config, sources, data and changes since the steps done; return lines for the console."""
        changed_data = self._changed_data(start, data)
        changed = [*self._changes, *changed_data]
        history = self.path / HISTORY_FILE
        if changed_data and history.exists():  # its indices of prompts refer to the earlier data
            history.rename(history.with_name(f"{history.stem}.until_{start}{history.suffix}"))
        if changed:
            with (self.path / CHANGES_FILE).open("ab") as file:
                file.writelines(encode_line({"step": start, **asdict(change)}) for change in changed)
        self._write_config()
        write_json(self.path / SOURCES_FILE, self._sources())
        write_json(self.path / DATA_FILE, data)
        last = max((record["step"] for record in read_steps(self.path / METRICS_FILE)), default=0)
        if not last and not start:  # the metrics may be gone, together with the checkpoints
            last = max((record["step"] for record in read_steps(history)), default=0)
        lost = []
        if last > start:
            lost = [f"steps {start + 1} to {last} were done, have no checkpoint that can be read, and are done again"]
        elif last < start:
            lost = [f"{self.path / METRICS_FILE} lacks steps {last + 1} to {start}, which are done"]
        return lost + [f"changed after step {start}: {change} ({change.meaning})" for change in changed]

    def _changed_data(self, start: int, data: Mapping[str, Any]) -> list[Change]:
        """Return [change] if the prompts, or their order, differ from those of the steps done, else []."""
        path = self.path / DATA_FILE
        if not start or not path.exists():
            return []
        was, now = read_json(path, digest=str)["digest"], data["digest"]
        if was == now:
            return []
        change = Change("data", f"digest {was[:16]}", f"digest {now[:16]}", "results")
        if not change.is_in(self._config.checkpoint.allow_changes):
            raise DataError(
                f"a run must go on with the prompts it began with, in order; by {path} their digest was {was[:9]}..., "
                f"now it is {now[:9]}...: restore the data, data.*, run.seed and the tokenizer, start over "
                "with checkpoint.resume=never, or read on in other data after step "
                f"{start} with checkpoint.allow_changes=[data]"
            )
        return [change]

    def _write_config(self) -> None:
        replace_text(self.path / CONFIG_FILE, self._config.to_yaml())

    def _first_does(self, name: str, kind: object, action: Callable[[], Any]) -> Any:
        """Call ``action`` on host 0 for all; a file system error becomes a ConfigError that names run.dir."""

        def act() -> Any:
            try:
                return action()
            except OSError as error:
                raise ConfigError(
                    f"run.dir must be a directory this process can write, got {self.path}: {error}"
                ) from error

        return first_does(self._hosts, name, kind, act)


# --- what hosts do with the directory they share ---------------------------------------------------------------------


def first_does(hosts: Hosts, name: str, kind: Any, action: Callable[[], Any]) -> Any:
    """Call ``action`` on host 0, and return its result, or raise its error, on every host; every host calls this.

    ``name`` names the action in messages; ``kind`` is the type of its result, which JSON can hold.
    """
    value = error = None
    if hosts.is_first:
        try:
            value = action()
        except TpuGrpoError as caught:
            error = caught
    answer = hosts.broadcast(name, (value, error and _sent(error)), tuple[kind | None, SentError | None])
    if answer[1] is not None:
        raise error or _received(answer[1])
    return answer[0]


def _sent(error: TpuGrpoError) -> SentError:
    return type(error).__name__, str(error)


def _received(answer: SentError) -> TpuGrpoError:
    kinds = {kind.__name__: kind for kind in TpuGrpoError.__subclasses__()}
    return kinds.get(answer[0], LockstepError)(answer[1])


def check_shared(directory: Path, token: str, hosts: Hosts, seconds: float) -> None:
    """Check that every host sees, in its ``directory``, the lock with this token, which host 0 has just taken.

    Hosts look for up to ``seconds``, because a file system may show the lock late.

    Raises:
        ConfigError: on every host; names the hosts that see another directory.
    """
    seen = hosts.is_first or _shows(directory / LOCK_FILE, token, seconds)
    where = f"{directory.absolute()} on {socket.gethostname()}"
    answers = hosts.share("shared run directory", (seen, where), tuple[bool, str])
    if apart := [f"host {index} ({place})" for index, (sees, place) in enumerate(answers) if not sees]:
        raise ConfigError(
            f"run.dir must be one directory that all hosts share, got {directory}: what host 0 has written to "
            f"{answers[0][1]} is not there for {', '.join(apart)}; name a directory on a file system that every host "
            "mounts, by its path on that host"
        )


def _shows(path: Path, token: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            owner = read_owner(path)
        except OSError:  # missing, or not readable by this host
            owner = None
        if owner is not None and owner.token == token:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)


def _agreed_steps(directory: Path, hosts: Hosts) -> tuple[int, ...]:
    """List the steps whose checkpoints a run can continue from, the same on every host. Raises LockstepError if hosts
    still see different steps after the time that a file system may take to show them."""
    deadline = time.monotonic() + STALE_SECONDS
    while True:
        mine = saved_steps(directory)
        late = time.monotonic() > deadline
        everyone = hosts.share("saved steps", (mine, late), tuple[tuple[int, ...], bool])
        if all(steps == everyone[0][0] for steps, _ in everyone):
            return mine
        if any(is_late for _, is_late in everyone):
            hosts.agree(f"the steps saved in {directory.name}", str(list(mine)))
        time.sleep(PAUSE)
