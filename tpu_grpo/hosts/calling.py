"""Says how the hosts of a run talk before jax connects them: in lines of JSON, see meeting.py."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpu_grpo.hosts.ending import host_names

VERSION = 1
LOOPBACK = "127.0.0.1"
LONGEST_LINE = 65536
REMEDY = "start the same command on every host, each with its own hosts.index"


@dataclass(frozen=True)
class Caller:
    """A host of a run, as it presents itself."""

    run: str
    """The name of the run."""
    index: int
    count: int
    who: str
    """Its process, for messages."""

    def to_line(self) -> bytes:
        """Write what this host says first."""
        return to_line({"tpu_grpo": VERSION} | asdict(self))


def this_process(run: str, index: int, count: int) -> Caller:
    """Present this process."""
    return Caller(run, index, count, f"process {os.getpid()} of {socket.gethostname()}")


def caller_of(line: bytes) -> Caller | None:
    """Read what another process said first; None if it is no host of a run."""
    said = read_line(line) or {}
    kinds = {"run": str, "index": int, "count": int, "who": str}
    if said.get("tpu_grpo") != VERSION or any(type(said.get(name)) is not kind for name, kind in kinds.items()):
        return None
    return Caller(**{name: said[name] for name in kinds})


def to_line(said: Mapping[str, Any]) -> bytes:
    """Write one line."""
    return json.dumps(said).encode() + b"\n"


def read_line(line: bytes) -> dict[str, Any] | None:
    """Read one line; None if it is none of ours."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def split_address(coordinator: str) -> tuple[str, int]:
    """Return the address and the port of ADDRESS:PORT; an IPv6 address may stand in brackets."""
    address, _, port = coordinator.rpartition(":")
    return address.strip("[]"), int(port)


def too_late(missing: Sequence[int], me: Caller, timeout_seconds: float) -> str:
    """Say which hosts did not come in time."""
    return (
        f"all {me.count} hosts must start within {timeout_seconds:g} s; {host_names(missing)} did not come (this is "
        f"host {me.index}); {REMEDY}"
    )
