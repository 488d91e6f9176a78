"""The messages between the main process, fork servers and workers.

The main process sends pickles, but unpickles nothing that it receives. A message to the main process is one line with a
session's number and the name of a dataclass, then the dataclass's fields as JSON, whose types are checked. The JSON may
hold NaN and integers beyond 64 bits. Arrays and bytes are base64 text, which the code that uses the field decodes; an
unpaired surrogate becomes a question mark.
"""

import base64
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter

Mode = Literal["per_session", "serial", "shared"]
_adapter = cache(TypeAdapter)


class Service(Protocol):
    """The code that workers run for their sessions. The service is sent to the workers as a pickle.

    In ``mode`` "per_session" each session (a conversation) has a worker of its own, forked after ``set_up``. In mode
    "serial" a worker has one session (a batch of a reward) after another. In mode "shared" a worker has many sessions
    at a time, on an event loop.
    """

    name: str
    """The service's name in errors, such as "reward length"."""
    mode: Mode
    start: str
    """What ``set_up`` does with users' code, for error messages, such as "imported"."""
    replies: tuple[type, ...]
    """The dataclasses that a worker may reply with."""
    most_bytes: int
    """The size of the largest message that a worker may send."""
    secrets: tuple[str, ...]
    """The names of the secret environment variables that the workers get."""

    def set_up(self) -> None:
        """Import users' code, and build what sessions share; may raise any exception."""
        ...

    def answering(self, went_on: Callable[[], None]) -> AbstractContextManager[Callable[[Any, float], Any]]:
        """Yield a function (request, seconds) -> reply. It calls ``went_on`` to restart the limit of ``seconds``.

        A service of mode "shared" has ``session(went_on)`` instead, which returns an object with the coroutines
        ``reply(request)`` and ``close()``, and with ``late(request, seconds)``. ``late`` returns the reply to a
        cancelled request.
        """
        ...


# --- from the main process ---


@dataclass(frozen=True)
class Job:
    """The job of a fork server and its workers."""

    service: Service
    memory_bytes: int
    """The most bytes that the server, each worker, and each process that these start may allocate."""


@dataclass(frozen=True)
class Fork:
    """Fork a worker with this number; a descriptor of the worker's socket is sent along."""

    number: int


@dataclass(frozen=True)
class Finish:
    """Kill the worker of this number if it has not ended by itself after this many seconds."""

    number: int
    seconds: float


# --- from servers and workers ---


@dataclass(frozen=True)
class Ready:
    """The first message of a server or worker. The process that sets up users' code sends it after the set-up."""


@dataclass(frozen=True)
class SetupFailed:
    """The only message of a process that could not set up users' code."""

    text: str
    trace: str


@dataclass(frozen=True)
class Exited:
    """A worker has ended; ``text`` says how, and ``forced`` whether its fork server killed it."""

    number: int
    text: str
    forced: bool


@dataclass(frozen=True)
class WentOn:
    """The next part of a request begins; each part has its own time limit. The reply follows the last part."""


def encode(number: int, record: Any) -> bytes:
    """Encode a record and its session's number as bytes."""
    fields = json.dumps(vars(record), ensure_ascii=False, default=_as_json)
    return f"{number} {type(record).__name__}\n{fields}".encode("utf-8", "replace")


def _as_json(value: Any) -> Any:
    if hasattr(value, "tobytes"):  # numpy's, which not every worker has imported
        return base64.b64encode(value.tobytes()).decode()
    if isinstance(value, bytes):
        return value.decode("ascii")
    if is_dataclass(value) or isinstance(value, Mapping):
        return dict(value if isinstance(value, Mapping) else vars(value))
    raise TypeError(f"{type(value).__name__} has no form in a message")


def decode(data: bytes, types: tuple[type, ...]) -> tuple[int, Any]:
    """Decode a message: the number of a session, and a record of one of ``types``. Raises ValueError for other data."""
    head, _, fields = data.partition(b"\n")
    number, name = head.decode("ascii").split(" ")
    of_name = [kind for kind in types if kind.__name__ == name]
    if not of_name:
        raise ValueError(f"a message must be one of {', '.join(kind.__name__ for kind in types)}, got {name!r}")
    return int(number), _adapter(of_name[0]).validate_json(fields, strict=True)
