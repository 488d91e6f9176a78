"""What hosts do with the directory they share: host 0 acts for all, the others see what it wrote, all see one state."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.run_files import saved_steps
from tpu_grpo.records import errors
from tpu_grpo.records.errors import ConfigError, TpuGrpoError
from tpu_grpo.run.owner import read_owner

SEEN_SECONDS = 20.0
"""What host 0 wrote must be there within this time for the others, which have not looked before."""
STALE_SECONDS = 60.0
"""A directory that a host has looked at, NFS may show as it was for so long."""
PAUSE = 0.5


def first_does(hosts: Hosts, name: str, action: Callable[[], Any]) -> Any:
    """Do something on host 0, and return what came of it, a value of JSON, or raise its error, on every host.

    Args:
        hosts: the processes of the run; every one of them calls this.
        name: what is done, for messages.
        action: is called on host 0 only.
    """
    if not hosts.is_first:
        told = json.loads(hosts.broadcast(name, None))
        if "error" in told:
            raise getattr(errors, told["error"])(told["message"])
        return told["value"]
    try:
        value = action()
    except TpuGrpoError as error:
        hosts.broadcast(name, json.dumps({"error": type(error).__name__, "message": str(error)}).encode())
        raise
    hosts.broadcast(name, json.dumps({"value": value}).encode())
    return value


def check_shared(directory: Path, lock_file: str, token: str, hosts: Hosts, *, looked_before: bool = False) -> None:
    """See that the lock which host 0 has just taken lies in this host's directory, too.

    Args:
        directory: the run's, by this host's path.
        lock_file: the name of host 0's lock in it.
        token: what that lock says.
        hosts: the processes of the run; every one of them calls this.
        looked_before: whether hosts have looked there, and may be shown the directory that lay there then.

    Raises:
        ConfigError: on every host, naming those that look into a directory of their own.
    """
    seen = hosts.is_first or _seen(directory / lock_file, token, STALE_SECONDS if looked_before else SEEN_SECONDS)
    where = f"{directory.absolute()} on {socket.gethostname()}"
    answers = _gathered(hosts, "shared run directory", [seen, where])
    if apart := [f"host {index} ({place})" for index, (sees, place) in enumerate(answers) if not sees]:
        raise ConfigError(
            f"run.dir must be one directory that all hosts share, got {directory}: what host 0 has written to "
            f"{answers[0][1]} is not there for {', '.join(apart)}; name a directory on a file system that every host "
            "mounts, by its path on that host"
        )


def agreed_steps(directory: Path, hosts: Hosts) -> tuple[int, ...]:
    """List the steps that can be gone on from, the same on every host.

    Raises:
        LockstepError: hosts see different ones, for longer than a file system may take to show them.
    """
    deadline = time.monotonic() + STALE_SECONDS
    while True:
        mine = saved_steps(directory)
        late = time.monotonic() > deadline
        everyone = _gathered(hosts, "saved steps", [mine, late])
        if all(steps == everyone[0][0] for steps, _ in everyone):
            return mine
        if any(is_late for _, is_late in everyone):
            hosts.agree(f"the steps saved in {directory.name}", str(list(mine)))
        time.sleep(PAUSE)


def _gathered(hosts: Hosts, name: str, value: Any) -> list[Any]:
    return [json.loads(answer) for answer in hosts.gather(name, json.dumps(value).encode())]


def _seen(path: Path, token: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            owner = read_owner(path)
        except OSError:  # not there, or not to be read by this host
            owner = None
        if owner is not None and owner.token == token:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)
