"""The service that workers run, and the messages between the main process, fork servers and workers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Mode = Literal["per_session", "serial", "shared"]


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
