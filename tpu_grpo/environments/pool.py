"""Runs the environments of one host's conversations in processes; used by the host's main process.

    pool = EnvironmentPool({"": load_environment(section.name, section.options)}, section, keep=False)
    pool.start(3, "", columns, seed)        # begin conversation 3: build and reset its environment, without waiting
    pool.act(3, action)                     # send the policy's turn: tool calls, or a text for the method step
    pool.end(3)                             # request the rewards, which ends the conversation
    pool.ready(3)                           # True once take would return immediately
    pool.take(3)                            # wait for the reply to the last request: Answered, Ended or Failure
    pool.close()

The pool has no thread: messages are read, and deadlines checked, when one of its methods is called.
"""

import collections
import errno
import math
import resource
import time
from collections.abc import Mapping
from typing import Any

from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import Action, Answered, Ended, LoadedEnvironment, Reply
from tpu_grpo.environments.environment_worker import End, EnvironmentService, Request, Start, late
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.channel import FOREIGN, BrokenChannelError
from tpu_grpo.workers.inside import allow_many_files
from tpu_grpo.workers.process import check_secrets
from tpu_grpo.workers.supervisor import FORK_SECONDS, Session, StartError, Supervisor, WorkerGroup

_CLOSE_SECONDS = 5.0
"""The time that a process has to close its environment after the episode."""
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0
"""If no request or reply was handled for this time, a conversation that the caller polls starts even if that exceeds
environment.workers (see ``_place``)."""


class _Conversation(Session):
    """One conversation: the current request to its environment, and the reply."""

    def __init__(self, pool: "EnvironmentPool", key: int, loaded: LoadedEnvironment, group: WorkerGroup):
        self._pool, self.key, self.loaded, self.group = pool, key, loaded, group
        self.request: Request | None = None
        """The request that is not answered yet."""
        self.reply: Reply | None = None
        """The reply that is not taken yet."""
        self.failed: Failure | None = None
        """The failure that ended the environment; None if there was none."""
        self._made = 0
        """The number of finished calls of the current turn."""

    def ask(self, request: Request) -> None:
        """Store a request."""
        self.request, self._made = request, 0
        if self.failed is not None:  # its process has ended before
            self.request, self.reply = None, self.failed

    def replied(self, reply: Reply) -> None:
        """Store the environment's reply; Ended and Failure also release the process."""
        _check(reply, self.request)
        self._settle(reply)
        if isinstance(reply, Ended | Failure):
            self.group.release(self, _CLOSE_SECONDS)

    def went_on(self) -> bool:
        """Count a finished call of the turn; return whether the turn has another call, which gets its own timeout."""
        has_more = isinstance(self.request, Action) and self._made + 1 < len(self.request.calls)
        self._made += has_more
        return has_more

    def late(self, *, has_begun: bool) -> None:
        """Store a failure: no reply came in time or, if ``has_begun`` is false, no process was forked in time."""
        assert self.request is not None, "nothing is asked"
        text = f"had no process after {FORK_SECONDS:g} s; see which threads its import starts, and what else runs"
        in_call = late(self.request, self.loaded.takes, self.seconds, self._made)
        self._settle(in_call if has_begun else Failure("late", text))

    def lost(self, how: str) -> None:
        """Store the failure that the environment's process ended; ``how`` is, for example, "exited with code 1"."""
        is_shared = self.loaded.is_async and not how.startswith("was ended with")
        self._settle(Failure("died", f"lost its process, which {how}" if is_shared else how))

    def _settle(self, reply: Reply) -> None:
        if isinstance(reply, Failure):
            self.failed = reply
        if self.request is not None:
            self.request, self.reply = None, reply
            self._pool.active_at = time.monotonic()


def _check(reply: Reply, request: Request | None) -> None:
    """Check that a reply is of the kind that its request gets, and that its numbers are finite. Raises
    BrokenChannelError otherwise."""
    numbers: tuple[float | None, ...] = ()
    match reply:
        case Answered(messages, reward):
            fits = not isinstance(request, End) and all(
                {"role", "content"} <= {*message} <= {"role", "name", "content"} for message in messages
            )
            numbers = (reward,)
        case Ended(reward, turn_rewards):
            fits, numbers = isinstance(request, End), (reward, *(turn_rewards or ()))
        case Failure():
            fits = True
    if not fits or not all(number is None or math.isfinite(number) for number in numbers):
        raise BrokenChannelError(FOREIGN)


class EnvironmentPool:
    """Runs the environments of a host's conversations; ``close`` ends their processes.

    The caller chooses an integer key for each conversation. A key may be used again once its conversation is over.
    """

    def __init__(self, loaded: Mapping[str, LoadedEnvironment], section: EnvironmentSection, keep: bool):
        """Start the processes that import the environments, without waiting for them. ``keep`` says whether ``Ended``
        contains the attributes of the environment."""
        check_secrets(section.secrets, "environment.secrets")
        allow_many_files()
        self._loaded, self._timeout = dict(loaded), section.timeout
        self._places = math.inf if section.workers == "auto" else section.workers
        self._by_key: dict[int, _Conversation] = {}
        self._waiting: collections.deque[_Conversation] = collections.deque()
        self.active_at = time.monotonic()
        """The time.monotonic() at which the last request to, or reply from, an environment was handled."""
        self.supervisor = Supervisor()
        shared = 1 if section.workers == "auto" else section.workers
        self.groups = {
            name: self.supervisor.add(
                EnvironmentService(each, keep, section.secrets),
                memory_bytes=int(section.memory_gb * 2**30),
                recycle=section.recycle,
                count=shared if each.is_async else 0,
            )
            for name, each in self._loaded.items()
        }

    def start(self, key: int, name: str, columns: Mapping[str, Any], seed: int) -> None:
        """Begin a conversation with an environment, and call its reset. Raises the errors of ``take``.

        Args:
            key: identifies the conversation in later calls.
            name: the environment's name in the config's table; "" if the config has a single environment.
            columns: the data columns of the row; ``reset`` gets the columns that are its parameters.
            seed: seeds the random numbers of the process, and is passed to ``reset`` if it has a parameter ``seed``.
        """
        assert key not in self._by_key, f"conversation {key} is not over"
        conversation = self._by_key[key] = _Conversation(self, key, self._loaded[name], self.groups[name])
        conversation.ask(Start(columns, seed))
        self._waiting.append(conversation)
        self._pump(0.0)

    def act(self, key: int, action: Action) -> None:
        """Send the policy's turn to a conversation's environment."""
        self._ask(key, action)

    def end(self, key: int) -> None:
        """Request the rewards of a conversation, and end it."""
        self._ask(key, End())

    def ready(self, key: int) -> bool:
        """Return whether the reply has arrived, so that ``take`` would return immediately."""
        conversation = self._by_key[key]
        self._pump(0.0, conversation, _PATIENCE_SECONDS)
        return conversation.reply is not None

    def take(self, key: int) -> Reply:
        """Wait for the environment's reply to the last request, and return it.

        After Ended and Failure the conversation is over, and its key is free. Raises EpisodeError if the environment
        could not be imported in its process.
        """
        conversation = self._by_key[key]
        assert conversation.request or conversation.reply, f"conversation {key} is asked nothing"
        while (reply := conversation.reply) is None:
            self._pump(_POLL_SECONDS, conversation)
        conversation.reply = None
        if isinstance(reply, Ended | Failure):
            self._forget(conversation)
        return reply

    def drop(self, key: int) -> None:
        """End a conversation without requesting its rewards; an environment that is busy gets no time to close."""
        conversation = self._by_key.get(key)
        if conversation is None:  # the conversation is over, or a signal came before ``start``
            return
        conversation.group.release(conversation, 0.0 if conversation.request else _CLOSE_SECONDS)
        self._forget(conversation)

    def close(self) -> None:
        """End all conversations and all processes; idle environments get a few seconds to close."""
        for key in [*self._by_key]:
            self.drop(key)
        self.supervisor.close(_CLOSE_SECONDS)

    def _ask(self, key: int, request: Request) -> None:
        conversation = self._by_key[key]
        assert conversation.request is conversation.reply is None, f"conversation {key} has not been taken"
        conversation.ask(request)
        if conversation.worker is not None:
            self._call(conversation)

    def _forget(self, conversation: _Conversation) -> None:
        del self._by_key[conversation.key]
        if conversation in self._waiting:
            self._waiting.remove(conversation)

    def _pump(self, seconds: float, wanted: _Conversation | None = None, patience: float = 0.0) -> None:
        """Read messages for up to ``seconds``, begin conversations that wait (`_place`), and enforce deadlines."""
        try:
            has_heard = self.supervisor.hear(0.0)
            self._place(wanted, patience)
            self.supervisor.advance(0.0 if has_heard else seconds)
        except StartError as error:
            raise EpisodeError(str(error)) from None

    def _place(self, wanted: _Conversation | None, patience: float) -> None:
        """Begin the conversations that wait, in order, up to environment.workers at a time, async ones not counted.

        The engine begins no more conversations than that. Another caller may poll a conversation beyond the limit
        (``wanted``), which starts anyway if all running conversations were idle for ``patience`` seconds.
        """
        if not self._waiting:
            return
        held = [each for each in self._by_key.values() if each.worker is not None]
        alone = sum(not each.loaded.is_async for each in held)
        is_stuck = time.monotonic() >= self.active_at + patience and not any(each.request for each in held)
        for conversation in [*self._waiting]:
            has_place = conversation.loaded.is_async or alone < self._places
            if not has_place and not (conversation is wanted and is_stuck):
                continue
            if not conversation.group.is_ready:
                conversation.group.starting.waited_for()
                continue
            self._waiting.remove(conversation)
            self._call(conversation)
            alone += not conversation.loaded.is_async

    def _call(self, conversation: _Conversation) -> None:
        self.active_at = time.monotonic()
        try:
            conversation.group.call(conversation, conversation.request, self._timeout)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            have = sum(each.worker is not None for each in self._by_key.values())
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise EpisodeError(
                f"each conversation with an environment needs an open file, and {have} have theirs, got "
                f"{error.strerror}; raise the limit (ulimit -n, at most {hard} here), or set environment.workers"
            ) from error
