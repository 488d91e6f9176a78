"""Reserves a run's directory for one process by a lock file, which names the process and is locked while it lives.

Three signs say whether the named process is alive; the first one that is available decides:

1. The operating system's lock on the file (flock), which always ends with its process. It works within one machine, and
   on file systems that pass locks between machines. Reward workers do not inherit it.
2. On this machine, if the file system has no locks: the process id, together with the start time of the process.
3. On another machine: the process increments a count in the file every ``BEAT_SECONDS``. A process that finds the file
   watches the count for ``SILENT_SECONDS``. Clocks are compared only to see that a file is older than ``OLD_SECONDS``.

A suspended process may be taken for dead. When it resumes, it finds another process named in its lock file, and ends.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import psutil

from tpu_grpo.hosts.ending import end_process
from tpu_grpo.observe.run_files import LOCK_FILE
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.untrusted_input import parse_json

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""A process on another machine is taken for dead when its count has not changed for this long. NFS and mounted buckets
may show the content of a minute ago."""
OLD_SECONDS = 1800.0
"""A file last written this long ago, by this machine's clock, belongs to a dead process; no need to watch it."""
SETTLE_SECONDS = 2.0
"""After taking over the lock of another machine's process, wait this long and read the file again: two processes may
have taken over the lock at the same time."""
RETRIES, PAUSE = 5, 0.2
"""Attempts to lock an open file, and seconds between them: another process that calls `holder` locks it briefly."""
ATTEMPTS = 20
"""The most times that the file is opened and locked: another process may replace it between opening and locking."""
RECORD_BYTES = 512
"""The file's content, an `Owner`, is padded to this size, so that it is rewritten in place and never seen cut off."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a directory."""

    host: str
    process: int
    since: str
    """When the process took the directory, UTC."""
    began: float
    """When the process began, in seconds since the epoch; tells it from a later process with the same id."""
    boot: str
    """Identifies the machine and its boot; containers of one machine have the same value."""
    namespace: str
    """The PID namespace of its process id."""
    token: str
    """A random id, different for every lock ever taken."""
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host} since {self.since}"


def read_owner(path: Path) -> Owner | None:
    """Read the owner from a lock file; None if there is none yet. Opens the file anew: NFS would show cached content.
    Raises OSError for a file that is missing, or cannot be read."""
    with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        return _parsed(file.read(RECORD_BYTES))


def _open(path: Path, flags: int) -> int:
    """Open the lock file; never through a link, because the link's target is not this package's file.

    Raises:
        ConfigError: the path is a link, a directory or a pipe.
        OSError: the file cannot be opened.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        if stat.S_ISREG((found := os.fstat(file)).st_mode) and found.st_nlink <= 1:
            return file
        os.close(file)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise ConfigError(
        f"run.dir must hold a file of its own as {path.name}, got a link, directory or pipe at {path}; "
        "remove it, or choose another run.dir"
    )


def _parsed(record: bytes) -> Owner | None:
    try:
        return Owner(**parse_json(record))
    except (ValueError, TypeError):  # not JSON, or not these fields
        return None


@cache
def _here() -> tuple[str, str]:
    """Return `Owner.boot` and `Owner.namespace` of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"{socket.gethostname()} {psutil.boot_time():.0f}"
    try:
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return boot, ""


class RunLock:
    """The lock of a directory, taken by `take` and held by this process until ``release``."""

    def __init__(self, path: Path, file: int, owner: Owner):
        self.owner = owner
        self._path, self._file, self._every = path, file, BEAT_SECONDS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="run lock", daemon=True)

    @classmethod
    def take(cls, directory: Path) -> "RunLock":
        """Lock an existing directory; the lock of a dead process is taken over.

        A process on another machine is watched for SILENT_SECONDS, with a line on stderr, before it is taken for dead.

        Raises:
            ConfigError: a live process holds the lock.
            OSError: the lock file cannot be created.
        """
        path = directory / LOCK_FILE
        for _ in range(ATTEMPTS):
            with contextlib.ExitStack() as stack:
                file = _open(path, os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, file)
                before = _lock_or_refuse(path, file)
                if not _is_at(path, file):  # the owner has removed or replaced the file since
                    continue
                since, began = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"), psutil.Process().create_time()
                owner = Owner(socket.gethostname(), os.getpid(), since, began, *_here(), token=uuid.uuid4().hex)
                lock = cls(path, file, owner)
                lock._write()
                if before is not None and before.boot != owner.boot:
                    time.sleep(SETTLE_SECONDS)
                    if (now := read_owner(path)) is not None and now.token != owner.token:
                        raise taken(directory, now)
                lock._thread.start()
                stack.pop_all()
                return lock
        raise taken(directory, None)

    def release(self, path: Path | None = None) -> None:
        """Remove the lock file, from ``path`` if its directory was moved, and stop the heartbeat."""
        self.stop_beating()
        path = path or self._path
        with contextlib.suppress(OSError):  # somebody removed the file or its directory
            if _is_at(path, self._file):
                path.unlink()
        os.close(self._file)

    def stop_beating(self) -> None:
        """Stop the heartbeat, and stop checking whether another process has taken over."""
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        os.pwrite(self._file, json.dumps(asdict(self.owner)).encode().ljust(RECORD_BYTES - 1) + b"\n", 0)
        os.fsync(self._file)

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._every):
            with contextlib.suppress(OSError):  # if the file system fails, the run's other files will show the error
                now = read_owner(self._path)
                if now is not None and now.token != self.owner.token:
                    end_process(
                        f"{self._path.parent} was taken over by {now}, because this process had given no sign of life "
                        "for too long; it was stopped, or its file system did not answer"
                    )
                self.owner = replace(self.owner, beat=self.owner.beat + 1)
                self._write()


def holder(directory: Path, *, guess: bool = False) -> Owner | None:
    """Return the process that holds a directory; None if no process does, or if finding out takes time.

    With ``guess``, a process on another machine counts as alive if its last heartbeat is younger than SILENT_SECONDS.
    """
    path = directory / LOCK_FILE
    try:
        file = _open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        held, owner = _is_held(file, fcntl.LOCK_SH), read_owner(path)
        if owner is None:
            return None
        if (lives := _lives(owner, held)) is None:
            lives = guess and time.time() - path.stat().st_mtime < SILENT_SECONDS
        return owner if lives else None
    finally:
        os.close(file)


def taken(directory: Path, owner: Owner | None) -> ConfigError:
    """Make the error for a directory that another process holds."""
    return ConfigError(
        f"run.dir must have one run at a time; {directory} is in use by {owner or 'a process that has just begun'}: "
        "wait until that run has ended, stop it, or give this one another run.name or run.dir; if you know that the "
        f"process is gone, remove {directory / LOCK_FILE}"
    )


def _lock_or_refuse(path: Path, file: int) -> Owner | None:
    """Lock the file; return the dead process that it names, or None; raise ConfigError if that process lives."""
    owner = None
    for attempt in range(RETRIES):
        if attempt:
            time.sleep(PAUSE)
        held = _is_held(file, fcntl.LOCK_EX)
        owner = _parsed(os.pread(file, RECORD_BYTES, 0))
        if not held:
            break
    else:
        raise taken(path.parent, owner)
    if owner is None:
        return None
    lives = _lives(owner, held)
    if lives is None:  # then its heartbeat shows it
        old = time.time() - path.stat().st_mtime >= OLD_SECONDS
        lives = not old and _beats(path, owner)
    if lives:
        raise taken(path.parent, owner)
    return owner


def _is_held(file: int, kind: int) -> bool | None:
    """Try to lock the file: False if this process got the lock, True if another has it, None if locks do not work."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # ENOLCK, EOPNOTSUPP, ENOSYS: each file system has its own way to say so
        return None
    return False


def _lives(owner: Owner, held: bool | None) -> bool | None:
    """Return whether the owner is alive; None if its lock and process id do not show it, as on another machine.

    ``held`` says whether a process holds the lock on the file; None if the file system has no locks.
    """
    if held:
        return True
    if held is False and owner.boot == _here()[0]:
        return False
    if (owner.boot, owner.namespace) != _here():
        return None
    try:
        return abs(psutil.Process(owner.process).create_time() - owner.began) < 2.0  # seconds; the clock may be set
    except psutil.NoSuchProcess:
        return False


def _beats(path: Path, owner: Owner) -> bool:
    """Return whether the record of a process on another machine changes within SILENT_SECONDS."""
    line = f"{path} names {owner}; looking for up to {SILENT_SECONDS:g} s whether that process still lives"
    print(line, file=sys.stderr, flush=True)
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, SILENT_SECONDS / 10))
        try:
            now = read_owner(path)
        except FileNotFoundError:  # just released
            return False
        if now is not None and now != owner:
            return True
    return False


def _is_at(path: Path, file: int) -> bool:
    """Return whether the open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
