"""One process at a time has a run's directory: a file in it says which, and is locked while that process lives.

    lock = RunLock.take(run_dir)        # ConfigError names the process that has it
    ...
    lock.release()

Three signs say whether the process that a file names is alive, and the first that can be had decides:

1. The operating system's lock on the file (flock) ends with its process, whatever ended it. It holds on one machine,
   and on file systems that carry it between machines. Reward workers do not inherit it.
2. On this machine, where the file system has no such lock: the process id, with the time at which that process began.
3. On another machine: the process writes a new count into the file every ``BEAT_SECONDS``. Whoever finds the file looks
   at it for ``SILENT_SECONDS``; clocks are not compared, unless the file is as old as ``OLD_SECONDS``.

A process that was thought dead, and was only stopped, finds another's name in its file and ends.
"""

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from tpu_grpo.hosts.ending import end_process
from tpu_grpo.observe.run_files import LOCK_FILE
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.owner import Owner, boot, process_lives, read_owner, this_process

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""A process on another machine is taken for dead when its count stood still for so long. NFS and mounted buckets may
show a file as it was a minute ago."""
OLD_SECONDS = 1800.0
"""A file that was written so long ago, by this machine's clock, is a dead process's without a further look."""
SETTLE_SECONDS = 2.0
"""After taking the place of a process on another machine, this one looks again: two may have come at the same time."""
RETRIES, PAUSE = 5, 0.2
"""A look at a directory holds its lock for a moment, and a new owner writes its name a moment after it has the lock."""
ATTEMPTS = 20
"""While many come and go, the file at hand may be another's by the time it is locked, so many times."""
RECORD_BYTES = 512
"""The record is padded to one size, so that it can be rewritten in place and is never seen cut off."""


class RunLock:
    """A directory that this process has, until ``release``; use `take`."""

    def __init__(self, path: Path, file: int, owner: Owner, beat_seconds: float):
        self.owner = owner
        self._path, self._file, self._every = path, file, beat_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="run lock", daemon=True)

    @classmethod
    def take(
        cls,
        directory: Path,
        *,
        silent_seconds: float = SILENT_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> "RunLock":
        """Take a directory that exists; one that another process left without releasing it is taken over.

        Args:
            directory: the run's.
            silent_seconds: how long a process on another machine is watched before it is taken for dead.
            beat_seconds: how often this process gives its own sign of life.
            tell: is given a line to show before a long wait.

        Raises:
            ConfigError: a process that lives has it.
            OSError: the file cannot be made.
        """
        path = directory / LOCK_FILE
        for _ in range(ATTEMPTS):
            with contextlib.ExitStack() as stack:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                stack.callback(os.close, file)
                before = _refuse_if_taken(path, file, silent_seconds, tell)
                if not _is_at(path, file):  # its owner has released it since, or another has taken its place
                    continue
                lock = cls(path, file, this_process(), beat_seconds)
                lock._claim(foreign=before is not None and before.boot != lock.owner.boot)
                stack.pop_all()
                return lock
        raise taken(directory, None)

    def release(self, path: Path | None = None) -> None:
        """Remove the file, from ``path`` if its directory was moved; give no further sign of life."""
        self.stop_beating()
        path = path or self._path
        with contextlib.suppress(OSError):  # removed by hand, or with its directory
            if _is_at(path, self._file):
                path.unlink()
        os.close(self._file)

    def stop_beating(self) -> None:
        """Give no further sign of life, and no longer look whether another process has taken over."""
        self._stop.set()
        self._thread.join()

    def _claim(self, foreign: bool) -> None:
        self._write()
        if foreign:
            time.sleep(SETTLE_SECONDS)
            if (now := read_owner(self._path)) is not None and now.token != self.owner.token:
                raise taken(self._path.parent, now)
        self._thread.start()

    def _write(self) -> None:
        os.pwrite(self._file, json.dumps(asdict(self.owner)).encode().ljust(RECORD_BYTES - 1) + b"\n", 0)
        os.fsync(self._file)

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._every):
            with contextlib.suppress(OSError):  # a file system that does not answer: the run's own files will say so
                now = read_owner(self._path)
                if now is not None and now.token != self.owner.token:
                    end_process(
                        f"{self._path.parent} was taken over by {now}, because this process had given no sign of life "
                        "for too long; it was stopped, or its file system did not answer"
                    )
                self.owner = replace(self.owner, beat=self.owner.beat + 1)
                self._write()


def holder(directory: Path, *, guess: bool = False) -> Owner | None:
    """Say who surely has a directory, without touching a file; None if nobody has, or if it takes time to find out.

    With ``guess``, a process on another machine counts whose sign of life is less than SILENT_SECONDS old.
    """
    path = directory / LOCK_FILE
    try:
        file = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        held = _is_held(file, fcntl.LOCK_SH)
        owner = read_owner(path)
        if owner is None or (held is False and owner.boot == boot()):
            return None
        if held is None and (lives := process_lives(owner)) is not None:
            return owner if lives else None
        return owner if held or (guess and _age(path) < SILENT_SECONDS) else None
    finally:
        os.close(file)


def taken(directory: Path, owner: Owner | None) -> ConfigError:
    """Make the error of a directory that another process has."""
    return ConfigError(
        f"run.dir must have one run at a time; {directory} is in use by {owner or 'a process that has just begun'}: "
        "wait until that run has ended, stop it, or give this one another run.name or run.dir; if you know that the "
        f"process is gone, remove {directory / LOCK_FILE}"
    )


def _refuse_if_taken(path: Path, file: int, silent_seconds: float, tell: Callable[[str], None]) -> Owner | None:
    """Return the owner that is gone, if there was one; raise for one that lives."""
    for attempt in range(RETRIES):
        if attempt:
            time.sleep(PAUSE)
        held, owner = _is_held(file, fcntl.LOCK_EX), _read_from(file)
        if not held:
            break
    else:
        raise taken(path.parent, owner)
    if owner is None or (held is False and owner.boot == boot()):
        return owner
    lives = process_lives(owner)
    if lives is None:
        lives = _age(path) < OLD_SECONDS and _beats(path, owner, silent_seconds, tell)
    if lives:
        raise taken(path.parent, owner)
    return owner


def _is_held(file: int, kind: int) -> bool | None:
    """Try to lock the file: False if this process now has the lock, True if another has it, None where none exists."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # ENOLCK, EOPNOTSUPP, ENOSYS: each file system has its own way to say so
        return None
    return False


def _beats(path: Path, owner: Owner, silent_seconds: float, tell: Callable[[str], None]) -> bool:
    """Watch the record of a process on another machine until it changes, or for so long that the process is dead."""
    tell(f"{path} names {owner}; looking for up to {silent_seconds:g} s whether that process still lives")
    deadline = time.monotonic() + silent_seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, silent_seconds / 10))
        try:
            now = read_owner(path)
        except FileNotFoundError:  # released at this moment
            return False
        if now is not None and now != owner:
            return True
    return False


def _read_from(file: int) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(file, RECORD_BYTES, 0)))
    except (ValueError, TypeError):
        return None


def _is_at(path: Path, file: int) -> bool:
    """Say whether the open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime
