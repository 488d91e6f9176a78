"""Brings the hosts of a run together on the coordinator's port, before jax's coordination service is started there.

jax's service mistakes any new client for a restarted host of its own run, and then ends that run. It also lets other
services bind its port (SO_REUSEPORT), so hosts of a second run on the same port could reach the first run's service.
Therefore hosts meet here before jax's client connects. They exchange lines of JSON:

    host 0 (`hold_port`)                          host 1 (`arrive`)
    listens on the port, exclusively              connects, and retries until host 0 is there
                                                  {"tpu_grpo": 1, "run": "demo", "index": 1, "count": 3, "who": ...}
    {"missing": [2]}                              waits
    all have joined: jax's service takes the port
    {"come": true, "nonces": [...], ...}          connects jax's client

jaxlib 0.10.2 usually crashes if the port is taken, so host 0 holds the port until jax's service listens. Host 0 sends
{"refused": ...} to a host of another run or with another count, and goes on. A host that finds another program on the
port, or the jax service of a run whose hosts have all joined, ends without disturbing it. A connection that has not
introduced a host is a stranger: it has `SPEAKING_SECONDS` to send a line of at most `LONGEST_LINE` bytes, and at most
`MOST_STRANGERS` are open at a time. If the run has a secret (authentication.py), host 0 refuses hosts that do not prove
that they know it; if the run has none, host 0 refuses hosts with a secret. Host 0's last line proves that host 0 knows
the secret, and has the nonces from which every host derives the run's key.
"""

import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tpu_grpo.hosts.authentication import VARIABLE, session_key, signature
from tpu_grpo.hosts.ending import host_names
from tpu_grpo.records.errors import ConfigError, LockstepError, TpuGrpoError

VERSION = 1
LOOPBACK = "127.0.0.1"
LONGEST_LINE = 65536
SPEAKING_SECONDS = 5.0
"""A connection that has not identified its host within this time is closed."""
MOST_STRANGERS = 128
"""The most open connections that have not identified their host; if there are more, the oldest is closed."""
MOST_NAMED = 20
"""At most this many refused hosts are named on stderr; all are counted."""
BACKLOG = 1024
RETRY_SECONDS = 0.2
PATIENCE_SECONDS = 10.0
"""Wait this long for a taken port, because it may belong to a run that is just ending."""
GRACE_SECONDS = 2.0
"""The other hosts wait this much longer than host 0, so that they get host 0's error, which names missing hosts."""
REMEDY = "start the same command on every host, each with its own hosts.index"


@dataclass(frozen=True)
class Caller:
    """A host of a run, as it introduced itself."""

    run: str
    """The name of the run."""
    index: int
    count: int
    who: str = field(default_factory=lambda: f"process {os.getpid()} of {socket.gethostname()}")
    """The host's process, for messages."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    proof: str = ""
    """Proves that the host knows the run's secret; hexadecimal, see `proven`."""

    def proven(self, secret: bytes) -> "Caller":
        """Return this caller with the proof that it knows the secret; an empty proof without a secret."""
        signed = (b"caller", self.run, self.index, self.count, self.who, self.nonce)
        return replace(self, proof=signature(secret, *(str(value).encode() for value in signed)).hex())

    def knows(self, secret: bytes) -> bool:
        """Whether the proof shows that the caller knows the secret; without a secret, whether the proof is empty."""
        return hmac.compare_digest(self.proof.encode(), self.proven(secret).proof.encode())

    def to_line(self) -> bytes:
        """Return the line with which this host introduces itself."""
        return _line({"tpu_grpo": VERSION} | asdict(self))


def caller_of(line: bytes) -> Caller | None:
    """Parse another process's first line; None if it is not from a host of a run. The result is safe to print."""
    message = _read(line) or {}
    kinds = {"run": str, "index": int, "count": int, "who": str, "nonce": str, "proof": str}
    if message.get("tpu_grpo") != VERSION or any(type(message.get(name)) is not kind for name, kind in kinds.items()):
        return None
    caller = Caller(**{name: message[name] for name in kinds})
    texts = caller.run + caller.who + caller.nonce + caller.proof
    sound = 0 <= caller.index < caller.count and texts.isprintable()
    return caller if sound else None


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read(line: bytes) -> dict[str, Any] | None:
    """Parse a line of JSON; None if it is invalid, is not an object, or holds text that cannot be encoded."""
    try:
        message = json.loads(line)
        json.dumps(message, ensure_ascii=False).encode()  # raises for lone surrogates
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def split_address(coordinator: str) -> tuple[str, int]:
    """Split ADDRESS:PORT; an IPv6 address may be in brackets."""
    address, _, port = coordinator.rpartition(":")
    return address.strip("[]"), int(port)


def own_address(coordinator: str) -> tuple[socket.AddressFamily, str, int]:
    """Resolve the coordinator to (family, IP address, port), where host 0 listens; raises ConfigError if that fails."""
    address, port = split_address(coordinator)
    try:
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"hosts.coordinator must name an address of host 0, got {coordinator} ({error.strerror}); give its IP "
            "address"
        ) from error
    return family, str(found[0]), port


def too_late(missing: Sequence[int], me: Caller, timeout_seconds: float, more: str = "") -> str:
    """Return the error text for hosts that did not join in time."""
    return (
        f"all {me.count} hosts must start within {timeout_seconds:g} s; {host_names(missing)}{more} did not come (this "
        f"is host {me.index}); {REMEDY}"
    )


def no_answer(coordinator: str, me: Caller, timeout_seconds: float, why: str) -> str:
    """Return the error text for a missing host 0, with the reason if it is known."""
    return (
        f"all {me.count} hosts must start within {timeout_seconds:g} s; host 0, the coordinator at {coordinator}, did "
        f"not answer host {me.index}{f' ({why})' if why else ''}; {REMEDY}, and check that hosts can reach that port"
    )


# --- host 0 ----------------------------------------------------------------------------------------------------------


@dataclass
class _Guest:
    """One connection to host 0."""

    connection: socket.socket
    since: float = field(default_factory=time.monotonic)
    received: bytes = b""
    caller: Caller | None = None

    def tell(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the connection is closed, which the next read notices
            self.connection.sendall(_line(message))


@dataclass
class Meeting:
    """Holds the port of host 0, and tracks which hosts have joined.

    with hold_port(coordinator, me, timeout_seconds) as meeting:
        meeting.await_all(timeout_seconds)
        meeting.share_port()
        ...                                     # jax's service is started
        meeting.call()
    """

    me: Caller
    coordinator: str
    listener: socket.socket
    secret: bytes = field(default=b"", repr=False)
    guests: list[_Guest] = field(default_factory=list)
    strangers: int = 0
    """The number of connections closed because they were not from a host of this run, refused hosts included."""
    sent_away: int = 0
    """The number of hosts that were refused with a reason."""

    def await_all(self, timeout_seconds: float) -> None:
        """Return when all hosts have joined; raises LockstepError if some did not join in time."""
        end = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while missing := self._missing():
                left = end - time.monotonic()
                if left <= 0:
                    self._tell_all({"late": missing})
                    raise LockstepError(too_late(missing, self.me, timeout_seconds) + self._seen())
                for key, _ in selector.select(min(left, SPEAKING_SECONDS)):
                    if key.data is None:
                        with suppress(OSError):  # the client has closed the connection
                            connection, _ = self.listener.accept()
                            connection.settimeout(RETRY_SECONDS)
                            self.guests.append(_Guest(connection))
                            selector.register(connection, selectors.EVENT_READ, self.guests[-1])
                    elif key.data in self.guests and not self._hear(key.data):
                        self._close(key.data, selector)
                silent, now = [guest for guest in self.guests if guest.caller is None], time.monotonic()
                for place, guest in enumerate(silent):
                    if now - guest.since > SPEAKING_SECONDS or place < len(silent) - MOST_STRANGERS:
                        self._close(guest, selector)
                if missing != self._missing():
                    self._tell_all({"missing": self._missing()})

    def _close(self, guest: _Guest, selector: selectors.BaseSelector) -> None:
        """Close a connection that has ended, or does not come from a host of this run."""
        self.strangers += guest.caller is None
        selector.unregister(guest.connection)
        guest.connection.close()
        self.guests.remove(guest)

    def _seen(self) -> str:
        seen = {"connections that were no hosts of this run": self.strangers, "hosts sent away": self.sent_away}
        return "".join(f"; {what}: {count}" for what, count in seen.items() if count)

    def share_port(self) -> None:
        """Let jax's service in this process bind the port, too; on Linux, no other run can bind the port meanwhile."""
        if sys.platform == "linux":  # elsewhere the option must be set before the first bind
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            self.listener.close()

    def call(self) -> None:
        """Tell all hosts to connect to the service, which listens now."""
        self.listener.close()
        proof = signature(self.session_key, b"come").hex()
        self._tell_all({"come": True, "nonces": self._nonces(), "proof": proof})

    @property
    def session_key(self) -> bytes:
        """The key of this run, once all hosts have joined; empty without a secret."""
        return session_key(self.secret, self._nonces())

    def _nonces(self) -> list[str]:
        return [caller.nonce for caller in sorted(self._present(), key=lambda caller: caller.index)]

    def _hear(self, guest: _Guest) -> bool:
        """Read what has come over a connection; return whether the connection is kept."""
        data = b""
        with suppress(OSError):
            data = guest.connection.recv(LONGEST_LINE)
        guest.received += data
        if not data or len(guest.received) > LONGEST_LINE:
            return False
        if guest.caller is not None or b"\n" not in guest.received:
            return True
        caller = caller_of(guest.received)
        return caller is not None and self._admit(guest, caller)

    def _admit(self, guest: _Guest, caller: Caller) -> bool:
        """Accept a host, or send it the reason for its refusal; return whether it was accepted."""
        try:
            self._check(caller)
        except TpuGrpoError as error:
            guest.tell({"refused": str(error), "code": error.exit_code})
            self.sent_away += 1
            if self.sent_away <= MOST_NAMED:
                who = f"{caller.who}, which came as host {caller.index}"
                print(f"sent away {who}: {error}", file=sys.stderr, flush=True)
            return False
        guest.caller = caller
        guest.tell({"missing": self._missing()})
        return True

    def _check(self, caller: Caller) -> None:
        me = self.me
        if not caller.knows(self.secret):
            theirs = "none" if not caller.proof else "another one" if self.secret else "one"
            raise ConfigError(
                f"{VARIABLE} must be the same on every host, got {'one' if self.secret else 'none'} on host 0 and "
                f"{theirs} on host {caller.index}; set it on all of them, or on none"
            )
        if caller.run != me.run:
            raise ConfigError(
                f"hosts.coordinator must be where host 0 of run {caller.run!r} waits, got {self.coordinator}, where "
                f"run {me.run!r} waits for its hosts ({me.who}); give every run a port of its own"
            )
        if caller.count != me.count:
            raise LockstepError(
                f"hosts.count must be the same on every host, got {me.count} on host 0 and {caller.count} on host "
                f"{caller.index}; start the same command on all of them"
            )
        for other in self._present():
            if other.index == caller.index:
                raise ConfigError(
                    f"hosts.index must be another one on every host, got {caller.index} from {other.who} and from "
                    f"{caller.who}; {REMEDY}"
                )

    def _present(self) -> list[Caller]:
        return [self.me, *(guest.caller for guest in self.guests if guest.caller is not None)]

    def _missing(self) -> list[int]:
        return sorted(set(range(self.me.count)) - {caller.index for caller in self._present()})

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for guest in self.guests:
            if guest.caller is not None:
                guest.tell(message)


@contextmanager
def hold_port(coordinator: str, me: Caller, timeout_seconds: float, secret: bytes = b"") -> Iterator[Meeting]:
    """Listen on host 0's address during the block; with a secret, hosts that do not know the secret are refused. Raises
    ConfigError if another program has the port, and keeps it."""
    with _listen(coordinator, min(PATIENCE_SECONDS, timeout_seconds)) as listener:
        meeting = Meeting(me, coordinator, listener, secret)
        try:
            yield meeting
        finally:
            for guest in meeting.guests:
                guest.connection.close()


def _listen(coordinator: str, patience_seconds: float) -> socket.socket:
    family, address, port = own_address(coordinator)
    end = time.monotonic() + patience_seconds
    while True:
        try:
            return socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"hosts.coordinator must be an address of host 0 itself and a port that it may listen on, got "
                    f"{coordinator} ({error.strerror}); give the address that the other hosts reach it by, and a port "
                    "from 1024 to 65535"
                ) from error
        if time.monotonic() > end:
            raise ConfigError(
                f"hosts.coordinator must name a port that is free on host 0, got {coordinator}, where "
                f"{_listening(port)} listens; if that is another run, it goes on: choose another port for this one, or "
                "end that"
            )
        time.sleep(RETRY_SECONDS)


def _listening(port: int) -> str:
    """Name the process that listens on a port of this machine, if this user may see it."""
    import psutil

    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr[1:] == (port,) and found.pid not in (0, os.getpid()):
                command = " ".join(" ".join(psutil.Process(found.pid).cmdline()).split())
                return f"process {found.pid} ({command[:200]})"
    return "another program"


# --- the other hosts -------------------------------------------------------------------------------------------------


class _StrangerError(Exception):
    """The program at the coordinator's port does not answer as host 0 would."""


def arrive(coordinator: str, me: Caller, timeout_seconds: float, secret: bytes = b"") -> bytes:
    """Connect to host 0, and wait until all hosts have joined and jax's service listens.

    Returns the key of this run; empty without a secret.

    Raises:
        ConfigError: host 0 has another secret, or another host has this index.
        LockstepError: another run or program has the port, host 0 or other hosts did not join in time, or were started
            with another count.
    """
    end = time.monotonic() + timeout_seconds + GRACE_SECONDS
    missing: list[int] = []
    me = me.proven(secret)
    why, strange_until = "", None
    while time.monotonic() < end:
        try:
            for message in _lines_of_host_0(coordinator, me, end):
                if "come" in message:
                    return _key_from(message, me, secret)
                if isinstance(refused := message.get("refused"), str):
                    raise (ConfigError if message.get("code") == ConfigError.exit_code else LockstepError)(refused)
                indices = message.get("late", message.get("missing"))
                if not (isinstance(indices, list) and all(type(index) is int for index in indices)):
                    raise _StrangerError
                missing = indices
                if "late" in message:
                    raise LockstepError(too_late(missing, me, timeout_seconds))
            strange_until = None  # host 0 went away
        except _StrangerError:
            strange_until = strange_until or time.monotonic() + min(PATIENCE_SECONDS, timeout_seconds)
            if time.monotonic() > strange_until:
                raise LockstepError(
                    f"hosts.coordinator must be where host 0 of this run waits, got {coordinator}, where something "
                    "else answers: a run that has all its hosts, which no host joins alone, or another program; start "
                    "all hosts again, or choose another port"
                ) from None
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(RETRY_SECONDS)
    late = too_late(missing, me, timeout_seconds)
    raise LockstepError(late if missing else no_answer(coordinator, me, timeout_seconds, why))


def _key_from(message: Mapping[str, Any], me: Caller, secret: bytes) -> bytes:
    """Return the key of the run from host 0's last line, which proves that host 0 knows the secret."""
    nonces, proof = message.get("nonces"), message.get("proof")
    if not (isinstance(nonces, list) and len(nonces) == me.count and nonces[me.index] == me.nonce):
        raise _StrangerError
    key = session_key(secret, [str(nonce) for nonce in nonces])
    if not (isinstance(proof, str) and hmac.compare_digest(proof.encode(), signature(key, b"come").hex().encode())):
        raise _StrangerError
    return key


def _lines_of_host_0(coordinator: str, me: Caller, end: float) -> Iterator[dict[str, Any]]:
    """Connect, introduce this host, and yield what host 0 says until it closes the connection.

    Raises _StrangerError if the answer does not look like host 0's, or is missing: host 0 always answers immediately.
    """

    def left() -> float:
        return max(0.1, end - time.monotonic())

    with socket.create_connection(split_address(coordinator), timeout=left()) as connection:
        connection.sendall(me.to_line())
        received, answered = b"", False
        while True:
            connection.settimeout(left())
            data = b""
            with suppress(ConnectionError):
                data = connection.recv(LONGEST_LINE)
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                message = _read(line)
                if message is None:
                    raise _StrangerError
                answered = True
                yield message
            if received and (received[:1] != b"{" or len(received) > LONGEST_LINE):
                raise _StrangerError
            if not data:
                if not answered:
                    raise _StrangerError
                return
