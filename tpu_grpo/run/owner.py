"""Says which process has a run's directory, and whether a process of that description still lives; see lock.py."""

import json
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Owner:
    """The record of the process that has a directory."""

    host: str
    process: int
    since: str
    """When it took the directory, UTC."""
    began: float
    """When the process began, in seconds since the epoch: a process id alone may be another's by now."""
    boot: str
    """Which start of which machine's kernel it lives in; containers of one machine share it."""
    namespace: str
    """Where its process id counts."""
    token: str
    """Different for every lock that was ever taken."""
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host} since {self.since}"


def read_owner(path: Path) -> Owner | None:
    """Read the record; None for a file that has none yet. The file is opened anew, or NFS would show it as it was.

    Raises:
        OSError: for a file that is not there, or cannot be read.
    """
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):  # not JSON, or not these fields
        return None


def this_process() -> Owner:
    """Describe this process as an owner, with a token of its own."""
    return Owner(
        host=socket.gethostname(),
        process=os.getpid(),
        since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        began=psutil.Process().create_time(),
        boot=boot(),
        namespace=_own_namespace(),
        token=uuid.uuid4().hex,
    )


def boot() -> str:
    """Name this start of this machine's kernel; where there is no such name, by the machine's and the time of it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def _own_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_lives(owner: Owner) -> bool | None:
    """Say whether the process is there; None if its process id does not count here."""
    if (owner.boot, owner.namespace) != (boot(), _own_namespace()):
        return None
    try:
        return abs(psutil.Process(owner.process).create_time() - owner.began) < 2.0  # seconds: the clock may be set
    except psutil.NoSuchProcess:
        return False
