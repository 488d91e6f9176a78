"""Prepares the directory that a run leaves its files in: it is made, continued, or moved aside, and never overwritten.

One run has it at a time (lock.py), all hosts of the run see the same one (sharing.py), and what lies there decides
whether this run may go on from it (earlier.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from tpu_grpo.config import RunConfig
from tpu_grpo.hosts import Hosts, host_log
from tpu_grpo.observe.json_lines import encode_line, replace_text, write_json
from tpu_grpo.observe.run_files import (
    CHANGES_FILE,
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    DATA_FILE,
    HISTORY_FILE,
    LOCK_FILE,
    LOGS_DIR,
    SOURCES_FILE,
)
from tpu_grpo.records.errors import ConfigError, DataError
from tpu_grpo.run.changes import Change, sources
from tpu_grpo.run.earlier import changes_since, check_required, free_name, must_move, read_json
from tpu_grpo.run.lock import RunLock
from tpu_grpo.run.owner import read_owner
from tpu_grpo.run.sharing import agreed_steps, check_shared, first_does


class RunDirectory:
    """``run.dir``, which one run has for the time of a ``with`` block; every host enters, and host 0 takes it for all.

        with RunDirectory(config, hosts) as directory:
            parts = build_parts(config, hosts)           # whatever may fail because of a wrong setting
            notes = directory.begin(parts.learner.restored_step, parts.task.prompts.describe())

    The files of an earlier run, also of the one that goes on, stay as they are until ``begin``.

    Raises, on every host:
        ConfigError: another run has the directory, it cannot be made or written, a host does not see it, it would have
            to be moved from under this process, or it holds the steps of another run.
        CheckpointError: there is no checkpoint, and ``checkpoint.resume=require``.
        LockstepError: hosts see different checkpoints.
    """

    def __init__(self, config: RunConfig, hosts: Hosts):
        self.path = config.run_dir
        self.saved_steps: tuple[int, ...] = ()
        """The steps that have a checkpoint to go on from, ascending, the same on every host."""
        self._config, self._hosts = config, hosts
        self._moves = False
        """Whether an earlier run lies there, and makes room for this one."""
        self._made = False
        """Whether host 0 has made the directory."""
        self._lock: RunLock | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._release)
            token = first_does(self._hosts, "run directory", self._take)
            check_shared(self.path, LOCK_FILE, token, self._hosts)
            if self._config.checkpoint.resume != "never":
                self.saved_steps = agreed_steps(self.path / CHECKPOINTS_DIR, self._hosts)
                check_required(self._config, self.saved_steps)
            self._moves = first_does(self._hosts, "what lies in run.dir", self._look)
            if not self._moves:
                stack.enter_context(host_log(self.path / LOGS_DIR, self._hosts.index))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def begin(
        self, start: int, data: Mapping[str, Any], digest_of_tokens: Callable[[], str] | None = None
    ) -> list[str]:
        """Make room for this run, or record how it goes on, now that nothing of its start is left to fail.

        Args:
            start: the steps that are done, 0 for a new run.
            data: what ``data.json`` says about the prompts, among it their ``digest``.
            digest_of_tokens: makes the digest that a run kept which was begun before digests were of texts.

        Returns:
            Lines for whoever watches: where files were moved, and what is not as it was.

        Raises:
            DataError: for other data than before, on every host, unless ``checkpoint.allow_changes`` names ``data``.
        """
        if not self._moves:
            return first_does(self._hosts, "the record of the run", lambda: self._go_on(start, data, digest_of_tokens))
        told = first_does(self._hosts, "moving an earlier run's files", self._move_aside)
        check_shared(self.path, LOCK_FILE, told["token"], self._hosts, looked_before=True)
        self._stack.enter_context(host_log(self.path / LOGS_DIR, self._hosts.index))
        first_does(self._hosts, "the record of the run", lambda: self._go_on(0, data))
        return [f"an earlier run's files were moved to {told['moved']}"]

    def is_ours(self) -> bool:
        """Say, on host 0, whether no other process has taken the directory from this one; it may be given back."""
        try:
            owner = read_owner(self.path / LOCK_FILE)
        except OSError:
            return self._lock is not None  # it was given back
        return self._lock is not None and owner is not None and owner.token == self._lock.owner.token

    def _take(self) -> str:
        self._made = not self.path.exists()
        with _writable(self._config):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock.take(self.path)
        return self._lock.owner.token

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        if self._made and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def _look(self) -> bool:
        """Say whether an earlier run has to make room; a directory without a run is marked as this one's."""
        with _writable(self._config):
            if must_move(self._config):
                return True
            changes_since(self._config)
        if not (self.path / CONFIG_FILE).exists():
            self._write_config()
        return False

    def _move_aside(self) -> dict[str, str]:
        """Rename the directory, and take a new one of its name; returns the old one's path and the new lock's token."""
        assert self._lock is not None
        before, aside = self._lock, free_name(self.path)
        before.stop_beating()
        with _writable(self._config):
            self.path.rename(aside)
            self._lock = None
            try:
                token = self._take()
            finally:
                before.release(aside / LOCK_FILE)
        self._write_config()  # first, or what a kill leaves would be no run's
        return {"moved": str(aside), "token": token}

    def _go_on(
        self, start: int, data: Mapping[str, Any], digest_of_tokens: Callable[[], str] | None = None
    ) -> list[str]:
        """Write what this run is, and what of it was otherwise in the steps that are done."""
        changed = [*changes_since(self._config), *self._changed_data(start, data, digest_of_tokens)]
        with _writable(self._config):
            if any(change.name == "data" for change in changed):
                self._forget_prompts(start)
            self._record(start, changed)
            self._write_config()
            write_json(self.path / SOURCES_FILE, sources(self._config))
            write_json(self.path / DATA_FILE, data)
        return [f"changed after step {start}: {change} ({change.meaning})" for change in changed]

    def _record(self, start: int, changed: Sequence[Change]) -> None:
        if changed:
            with (self.path / CHANGES_FILE).open("ab") as file:
                file.writelines(encode_line({"step": start, **asdict(change)}) for change in changed)

    def _changed_data(
        self, start: int, data: Mapping[str, Any], digest_of_tokens: Callable[[], str] | None
    ) -> list[Change]:
        """Compare the prompts, whose order says what the position of a step means."""
        path = self.path / DATA_FILE
        if not start or not path.exists():
            return []
        before = read_json(path)
        was, now = before["digest"], data["digest"]
        if digest_of_tokens is not None and before.get("digest_of") != data.get("digest_of"):
            now = digest_of_tokens()
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

    def _forget_prompts(self, start: int) -> None:
        """Put away what is known of prompts by their numbers: other prompts have these numbers now."""
        path = self.path / HISTORY_FILE
        if path.exists():
            path.rename(path.with_name(f"{path.stem}.until_{start}{path.suffix}"))

    def _write_config(self) -> None:
        with _writable(self._config):
            replace_text(self.path / CONFIG_FILE, self._config.to_yaml())


@contextmanager
def _writable(config: RunConfig) -> Iterator[None]:
    """Say of an error of the file system which setting it comes from."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run.dir must be a directory this process can write, got {config.run_dir}: {error}"
        ) from error
