"""Is the side of the hosts other than 0 when a run's hosts meet, see meeting.py."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tpu_grpo.hosts.calling import LONGEST_LINE, REMEDY, Caller, read_line, split_address, too_late
from tpu_grpo.hosts.meeting import PATIENCE_SECONDS, RETRY_SECONDS
from tpu_grpo.records.errors import ConfigError, LockstepError

GRACE_SECONDS = 2.0
"""A host waits so much longer than host 0 that host 0's answer comes first."""


class _StrangerError(Exception):
    """What is at the coordinator's port does not talk as host 0 does."""


def arrive(coordinator: str, me: Caller, timeout_seconds: float) -> None:
    """Go to host 0 and wait there; returns when all hosts have come and jax's service listens.

    Raises:
        ConfigError: something else is there, such as another run.
        LockstepError: host 0 or other hosts did not come in time, or were started with another count.
    """
    end = time.monotonic() + timeout_seconds + GRACE_SECONDS
    visit = _Visit(coordinator, me, timeout_seconds, end)
    strange_until = None
    while time.monotonic() < end:
        try:
            if visit.wait():
                return
            strange_until = None
        except _StrangerError:
            strange_until = strange_until or time.monotonic() + min(PATIENCE_SECONDS, timeout_seconds)
            if time.monotonic() > strange_until:
                raise ConfigError(
                    f"hosts.coordinator must be where host 0 of this run waits, got {coordinator}, where something "
                    "else answers: a run that has all its hosts, which goes on, or another program; choose another port"
                ) from None
        except OSError as error:
            visit.why = error.strerror or str(error)
        time.sleep(RETRY_SECONDS)
    raise LockstepError(visit.why_late())


class _Visit:
    """Connects to host 0, listens to what it says, and remembers it."""

    def __init__(self, coordinator: str, me: Caller, timeout_seconds: float, end: float) -> None:
        self.coordinator, self.me, self.timeout_seconds, self.end = coordinator, me, timeout_seconds, end
        self.why = ""
        """Why there was no connection at last."""
        self._missing: list[int] = []

    def wait(self) -> bool:
        """Say whether host 0 called; False if it went away before."""
        for said in self._lines():
            if "come" in said:
                return True
            if "refused" in said:
                kind = ConfigError if said["code"] == ConfigError.exit_code else LockstepError
                raise kind(said["refused"])
            self._missing = said.get("late", said.get("missing", []))
            if "late" in said:
                raise LockstepError(self.why_late())
        return False

    def why_late(self) -> str:
        if self._missing:
            return too_late(self._missing, self.me, self.timeout_seconds)
        return (
            f"all {self.me.count} hosts must start within {self.timeout_seconds:g} s; host 0, the coordinator at "
            f"{self.coordinator}, did not answer host {self.me.index}{f' ({self.why})' if self.why else ''}; {REMEDY}, "
            "and check that hosts can reach that port"
        )

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Give what host 0 says until it ends the connection; it answers at once, whoever comes."""
        with socket.create_connection(split_address(self.coordinator), timeout=self._left()) as connection:
            connection.sendall(self.me.to_line())
            received, answered = b"", False
            while True:
                connection.settimeout(self._left())
                data = b""
                with suppress(ConnectionError):
                    data = connection.recv(LONGEST_LINE)
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    said = read_line(line)
                    if said is None:
                        raise _StrangerError
                    answered = True
                    yield said
                if received and (received[:1] != b"{" or len(received) > LONGEST_LINE):
                    raise _StrangerError
                if not data:
                    if not answered:
                        raise _StrangerError
                    return

    def _left(self) -> float:
        return max(0.1, self.end - time.monotonic())
