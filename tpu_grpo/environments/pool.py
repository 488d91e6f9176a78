"""The conversations of one host with environments, as seen by its main process.

    pool = EnvironmentPool({"": load_environment(section.name, section.options)}, section, keep=False)
    pool.start(3, "", columns, seed)        # builds and resets an environment in a process, without waiting
    pool.act(3, action)                     # makes the calls of an Action in order, or passes its text
    pool.end(3)                             # asks for the rewards; then the process is free again
    pool.ready(3)                           # whether take would not wait
    pool.take(3)                            # Answered, Ended or Failed; waits
    pool.close()

The pool has no thread: messages are read, and deadlines checked, when one of its methods is called.
"""

import collections
import errno
import math
import resource
import time
from collections.abc import Mapping
from typing import Any, Self

from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import Action, Answered, Ended, Failed, LoadedEnvironment, Reply
from tpu_grpo.environments.playing import Act, End, PlayedEnvironment, Request, Start, late
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.channel import FOREIGN, BrokenChannelError
from tpu_grpo.workers.inside import allow_many_files
from tpu_grpo.workers.process import check_secrets
from tpu_grpo.workers.supervisor import FORK_SECONDS, Crew, Session, StartError, Supervisor

_CLOSE_SECONDS = 5.0
"""The time that a process has to close its environment after the episode."""
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0
"""A conversation that is polled without having a place gets one after this time without any request or reply."""


class _Conversation(Session):
    """One conversation: the current request to its environment, and the reply."""

    def __init__(self, pool: "EnvironmentPool", key: int, loaded: LoadedEnvironment, crew: Crew):
        self._pool, self.key, self.loaded, self.crew = pool, key, loaded, crew
        self.request: Request | None = None
        """The request that is not answered yet."""
        self.reply: Reply | None = None
        """The reply that is not taken yet."""
        self.failed: Failed | None = None
        """The failure that ended its environment, if any."""
        self._made = 0
        """The number of finished calls of the current turn."""

    def ask(self, request: Request) -> None:
        """Store a request."""
        self.request, self._made = request, 0
        if self.failed is not None:  # its process has ended before
            self.request, self.reply = None, self.failed

    def replied(self, reply: Reply) -> None:
        """Take the environment's answer."""
        _check(reply, self.request)
        self._settle(reply)
        if isinstance(reply, Ended | Failed):
            self._pool.supervisor.release(self, _CLOSE_SECONDS)

    def went_on(self) -> bool:
        """Take note that the next call of the turn has begun, which has its own timeout."""
        has_more = isinstance(self.request, Act) and self._made + 1 < len(self.request.action.calls)
        self._made += has_more
        return has_more

    def late(self, *, has_begun: bool) -> None:
        """Take note that no answer came in time, or that no process was forked in time."""
        assert self.request is not None, "nothing is asked"
        text = f"had no process after {FORK_SECONDS:g} s; see which threads its import starts, and what else runs"
        not_begun = Failed(Failure("late", text))
        self._settle(late(self.request, self.loaded.takes, self.seconds, self._made) if has_begun else not_begun)

    def lost(self, how: str) -> None:
        """Take note that the environment's process is gone."""
        text = (
            f"lost its process, which {how}" if self.loaded.is_async and not how.startswith("was ended with") else how
        )
        self._settle(Failed(Failure("died", text)))

    def _settle(self, reply: Reply) -> None:
        if isinstance(reply, Failed):
            self.failed = reply
        if self.request is not None:
            self.request, self.reply = None, reply
            self._pool.active_at = time.monotonic()


def _check(reply: Reply, request: Request | None) -> None:
    """Check a reply beyond its types. Raises BrokenChannelError for a reply that this package's code does not send to
    such a request."""
    numbers: tuple[float | None, ...] = ()
    match reply:
        case Answered(messages, reward):
            fits = not isinstance(request, End) and all({"role", "content"} <= {*message} for message in messages)
            numbers = (reward,)
        case Ended(reward, turn_rewards):
            fits, numbers = isinstance(request, End), (reward, *(turn_rewards or ()))
        case Failed():
            fits = True
    if not fits or not all(number is None or math.isfinite(number) for number in numbers):
        raise BrokenChannelError(FOREIGN)


class EnvironmentPool:
    """The environments of a host's conversations; close it, or use it in a ``with`` block.

    Keys are chosen by the caller, one for each conversation that is not over.
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
        """When an environment last was asked something, or answered."""
        self.supervisor = Supervisor()
        shared = 1 if section.workers == "auto" else section.workers
        self.crews = {
            name: self.supervisor.add(
                PlayedEnvironment(each, keep, section.secrets),
                memory_bytes=int(section.memory_gb * 2**30),
                recycle=section.recycle,
                count=shared if each.is_async else 0,
            )
            for name, each in self._loaded.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, key: int, name: str, columns: Mapping[str, Any], seed: int) -> None:
        """Begin a conversation with an environment, and call its reset; raises like ``take``.

        Args:
            key: identifies the conversation in later calls.
            name: the environment's name in the config's table; "" for the only one.
            columns: the columns of the row; ``reset`` gets those that it takes.
            seed: seeds the random numbers of the process, and is passed to ``reset`` if that takes ``seed``.
        """
        assert key not in self._by_key, f"conversation {key} is not over"
        conversation = self._by_key[key] = _Conversation(self, key, self._loaded[name], self.crews[name])
        conversation.ask(Start(columns, seed))
        self._waiting.append(conversation)
        self._pump(0.0)

    def act(self, key: int, action: Action) -> None:
        """Send the policy's turn to a conversation's environment."""
        self._ask(key, Act(action))

    def end(self, key: int) -> None:
        """Request the rewards of a conversation, and end it."""
        self._ask(key, End())

    def ready(self, key: int) -> bool:
        """Return whether ``take`` would not wait."""
        conversation = self._by_key[key]
        self._pump(0.0, conversation, _PATIENCE_SECONDS)
        return conversation.reply is not None

    def take(self, key: int) -> Reply:
        """Wait for the environment's reply to the last request, and return it.

        After Ended and Failed the conversation is over, and its key is free.

        Raises:
            EpisodeError: if the environment could not be imported in its process.
        """
        conversation = self._by_key[key]
        assert conversation.request is not None or conversation.reply is not None, (
            f"conversation {key} is asked nothing"
        )
        while (reply := conversation.reply) is None:
            self._pump(_POLL_SECONDS, conversation)
        conversation.reply = None
        if isinstance(reply, Ended | Failed):
            self._forget(conversation)
        return reply

    def drop(self, key: int) -> None:
        """End a conversation without requesting its rewards; an environment that is in a call is ended at once."""
        conversation = self._by_key.get(key)
        if conversation is None:  # it is over, or a signal came before it was begun
            return
        self.supervisor.release(conversation, 0.0 if conversation.request else _CLOSE_SECONDS)
        self._forget(conversation)

    def give_up(self) -> None:
        """End all conversations at once."""
        for key in [*self._by_key]:
            self.drop(key)

    def close(self) -> None:
        """End all conversations and all processes; environments get time to close."""
        self.give_up()
        self.supervisor.close(_CLOSE_SECONDS)

    def _ask(self, key: int, request: Request) -> None:
        conversation = self._by_key[key]
        assert conversation.request is conversation.reply is None, f"conversation {key} has not been taken"
        conversation.ask(request)
        if conversation.worker is not None:
            self._send(conversation)

    def _send(self, conversation: _Conversation) -> None:
        self.active_at = time.monotonic()
        self.supervisor.ask(conversation, conversation.request, self._timeout)

    def _forget(self, conversation: _Conversation) -> None:
        del self._by_key[conversation.key]
        if conversation in self._waiting:
            self._waiting.remove(conversation)

    def _pump(self, seconds: float, wanted: _Conversation | None = None, patience: float = 0.0) -> None:
        """Read the messages that arrive within ``seconds``, send waiting ones, and enforce the deadlines."""
        try:
            has_heard = self.supervisor.hear(0.0)
            self._place(wanted, patience)
            self.supervisor.advance(0.0 if has_heard else seconds)
        except StartError as error:
            raise EpisodeError(str(error)) from None

    def _place(self, wanted: _Conversation | None, patience: float) -> None:
        """Start the conversations that wait, in their order, as long as there are places for them.

        An engine begins no more conversations than there are places. Another caller may wait for a conversation
        without a place before it goes on with the others: that one is started anyway if all others are idle.
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
            if not conversation.crew.is_ready:
                conversation.crew.starting.waited_for()
                continue
            self._waiting.remove(conversation)
            self._begin(conversation)
            self._send(conversation)
            alone += not conversation.loaded.is_async

    def _begin(self, conversation: _Conversation) -> None:
        try:
            conversation.crew.begin(conversation)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            have = sum(each.worker is not None for each in self._by_key.values())
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise EpisodeError(
                f"each conversation with an environment needs an open file, and {have} have theirs, got "
                f"{error.strerror}; raise the limit (ulimit -n, at most {hard} here), or set environment.workers"
            ) from error
