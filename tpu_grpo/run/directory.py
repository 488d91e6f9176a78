"""Prepares the directory that a run leaves its files in: it is made, continued, or moved aside, and never overwritten.

One run has it at a time (lock.py), and all hosts of the run see the same one (sharing.py).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tpu_grpo.config import RunConfig
from tpu_grpo.errors import ConfigError, DataError
from tpu_grpo.hosts import Hosts, host_log
from tpu_grpo.metrics.jsonl import replace_text, write_json
from tpu_grpo.metrics.run_files import CHECKPOINTS_DIR, CONFIG_FILE, DATA_FILE, LOCK_FILE, LOGS_DIR
from tpu_grpo.run.lock import RunLock
from tpu_grpo.run.sharing import agreed_steps, check_shared, first_does


class RunDirectory:
    """``run.dir``, which one run has for the time of a ``with`` block; every host enters, and host 0 takes it for all.

        with RunDirectory(config, hosts) as directory:
            parts = build_parts(config, hosts)           # whatever may fail because of a wrong setting
            moved = directory.begin()

    An earlier run's files stay where they are until ``begin``, so that a start that fails leaves them.

    Raises, on every host:
        ConfigError: another run has the directory, it cannot be made or written, a host does not see it, or it would
            have to be moved from under this process.
        LockstepError: hosts see different checkpoints.
    """

    def __init__(self, config: RunConfig, hosts: Hosts):
        self.path = config.run_dir
        self.saved_steps: tuple[int, ...] = ()
        """The steps that have a checkpoint to go on from, ascending, the same on every host."""
        self._config, self._hosts = config, hosts
        self._starts_over = config.checkpoint.resume == "never"
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
            if not self._starts_over:
                self.saved_steps = agreed_steps(self.path / CHECKPOINTS_DIR, self._hosts)
            self._moves = first_does(self._hosts, "an earlier run", self._must_move)
            if not self._moves:
                first_does(self._hosts, "the config of the run", self._write_config)
                stack.enter_context(host_log(self.path / LOGS_DIR, self._hosts.index))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def begin(self) -> str | None:
        """Make room for this run, now that nothing of its start is left to fail.

        Returns:
            Where an earlier run's files were moved, if they were.
        """
        if not self._moves:
            return None
        told = first_does(self._hosts, "moving an earlier run's files", self._move_aside)
        check_shared(self.path, LOCK_FILE, told["token"], self._hosts)  # it may still show the directory that was moved
        self._stack.enter_context(host_log(self.path / LOGS_DIR, self._hosts.index))
        return told["moved"]

    def _take(self) -> str:
        self._made = not self.path.exists()
        with _writable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock.take(self.path)
        return self._lock.owner.token

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        if self._made and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def _must_move(self) -> bool:
        """Say whether files of an earlier run have to make room, and see that they can."""
        if not self._starts_over or all(path.name == LOCK_FILE for path in self.path.iterdir()):
            return False
        if Path.cwd().is_relative_to(self.path.resolve()):
            raise ConfigError(
                "run.dir must not hold the working directory with checkpoint.resume=never, which moves earlier files "
                f"aside, got {self.path}; name a directory of the run's own"
            )
        if not (self.path / CONFIG_FILE).exists():
            raise ConfigError(
                f"run.dir holds files that are no run's (no {CONFIG_FILE} among them), got {self.path}, and "
                "checkpoint.resume=never would move them aside; name a directory of the run's own"
            )
        return True

    def _move_aside(self) -> dict[str, str]:
        """Rename the directory, and take a new one of its name; returns the old one's path and the new lock's token."""
        assert self._lock is not None
        before, number = self._lock, 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        before.stop_beating()
        with _writable(self.path):
            self.path.rename(aside)
            self._lock = None
            try:
                token = self._take()
            finally:
                before.release(aside / LOCK_FILE)
        self._write_config()
        return {"moved": str(aside), "token": token}

    def _write_config(self) -> None:
        with _writable(self.path):
            replace_text(self.path / CONFIG_FILE, self._config.to_yaml())


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


@contextmanager
def _writable(directory: Path) -> Iterator[None]:
    """Say of an error of the file system which setting it comes from."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"run.dir must be a directory this process can write, got {directory}: {error}") from error
