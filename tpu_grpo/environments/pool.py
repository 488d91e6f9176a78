"""The conversations with environments of one host, as its main process sees them.

    pool = EnvironmentPool({"": load_environment(section.name, section.options)}, section, keep=False)
    pool.start(3, "", columns, seed)        # a new environment in a process, and its reset; nothing is waited for
    pool.act(3, action)                     # the calls of an Action in order, or its text
    pool.end(3)                             # what the episode is worth; then the process is free again
    pool.ready(3)                           # whether take would not wait
    pool.take(3)                            # Answered, Ended or Failed; waits
    pool.close()

It has no thread: what comes in is taken in whenever one of its methods is called, and deadlines are kept then. An
answer that came before anybody looked is no late one.
"""

import collections
import contextlib
import heapq
import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from selectors import DefaultSelector
from typing import Any, Self

from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import Action, Ended, Failed, LoadedEnvironment, Reply
from tpu_grpo.environments.forked import ForkedEnvironments
from tpu_grpo.environments.pooled import FORK_SECONDS, Pooled
from tpu_grpo.environments.requests import Act, End, Job, Request, Start
from tpu_grpo.environments.shared import SharedEnvironments
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.open_files import allow_many_files

_CLOSE_SECONDS = 5.0
"""A process has this time to close its environment after the episode."""
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0
"""Who polls for a conversation that has no place gets one for it if nobody was asked anything for so long."""
_FULL_SECONDS = 0.005
"""What does not fit into a socket is tried again after this time."""


class EnvironmentPool:
    """The environments of a host's conversations; close it, or use it in a ``with`` block.

    Keys are the caller's, one for each conversation that is not over.
    """

    def __init__(self, loaded: Mapping[str, LoadedEnvironment], section: EnvironmentSection, keep: bool):
        """Start the processes that import the environments, without waiting for them.

        ``keep`` says whether ``Ended`` brings the attributes of the environment.
        """
        allow_many_files()
        self._loaded, self._timeout = dict(loaded), section.timeout
        self._places = float("inf") if section.workers == "auto" else section.workers
        self._selector = DefaultSelector()
        self._by_key: dict[int, Pooled] = {}
        self._by_number: dict[int, Pooled] = {}
        self._waiting: collections.deque[Pooled] = collections.deque()
        self._numbers = itertools.count()
        self._deadlines: list[tuple[float, int]] = []
        self._active_at = time.monotonic()
        self._homes: dict[str, ForkedEnvironments | SharedEnvironments] = {}
        for name, environment in self._loaded.items():
            job = Job(environment, int(section.memory_gb * 2**30), keep)
            self._homes[name] = self._home(job, section)

    def _home(self, job: Job, section: EnvironmentSection) -> ForkedEnvironments | SharedEnvironments:
        if not job.loaded.is_async:
            return ForkedEnvironments(job, Path.cwd(), section.recycle, self._selector, self)
        count = 1 if section.workers == "auto" else section.workers
        return SharedEnvironments(job, Path.cwd(), count, section.recycle, self._selector, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what is asked -----------------------------------------------------------------------------------------------

    def start(self, key: int, name: str, columns: Mapping[str, Any], seed: int) -> None:
        """Begin a conversation with an environment, and call its reset.

        Args:
            key: the conversation's, by which it is asked.
            name: the environment's in the config's table; "" for the only one.
            columns: what ``reset`` gets, as far as it takes them.
            seed: what random numbers of the process, and a parameter ``seed`` of ``reset``, come from.

        Raises:
            EpisodeError: if the environment could not be imported in its process.
        """
        assert key not in self._by_key, f"conversation {key} is not over"
        conversation = Pooled(key, next(self._numbers), self._loaded[name], self._homes[name])
        conversation.request, conversation.asked_at = Start(columns, seed), time.monotonic()
        self._by_key[key] = self._by_number[conversation.number] = conversation
        self._waiting.append(conversation)
        self._pump(0.0)

    def act(self, key: int, action: Action) -> None:
        """Give the policy's turn to a conversation's environment."""
        self._ask(key, Act(action))

    def end(self, key: int) -> None:
        """Ask what a conversation was worth, and end it."""
        self._ask(key, End())

    def ready(self, key: int) -> bool:
        """Say whether ``take`` would not wait."""
        conversation = self._by_key[key]
        self._pump(0.0, conversation, _PATIENCE_SECONDS)
        return conversation.reply is not None

    def take(self, key: int) -> Reply:
        """Wait for what the environment answers to what it was last asked, and return it.

        After Ended and Failed the conversation is over, and its key free.

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
        """End a conversation without asking anything; one whose environment is at work is ended at once."""
        conversation = self._by_key.get(key)
        if conversation is None:  # it is over, or a signal came before it was begun
            return
        if conversation.is_placed:
            conversation.home.release(conversation.number, 0.0 if conversation.request else _CLOSE_SECONDS)
        self._forget(conversation)

    def give_up(self) -> None:
        """End all conversations at once."""
        for key in [*self._by_key]:
            self.drop(key)

    def close(self) -> None:
        """End all conversations and all processes; environments have their time to close."""
        self.give_up()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(home.is_closing for home in self._homes.values()) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(EpisodeError):  # another one could not be imported, which matters no more
                self._hear(min(left, _POLL_SECONDS))
            for home in self._homes.values():
                home.flush()
        for home in self._homes.values():
            home.close()
        self._homes.clear()
        self._selector.close()

    # --- what the processes say --------------------------------------------------------------------------------------

    def began(self, number: int) -> None:
        """Take note that a conversation's process is there, and what it is asked first has its time."""
        conversation = self._by_number.get(number)
        if conversation is not None and conversation.request is not None and not conversation.has_begun:
            conversation.has_begun = True
            self._expect(conversation)

    def went_on(self, number: int) -> None:
        """Take note that the next call of a conversation's turn has begun, which has its own time."""
        conversation = self._by_number.get(number)
        if conversation is not None and conversation.has_more_calls:
            conversation.made += 1
            self._expect(conversation)

    def answered(self, number: int, reply: Reply) -> None:
        """Take a reply to what a conversation was asked."""
        conversation = self._by_number.get(number)
        if conversation is None or conversation.request is None:
            return
        if isinstance(reply, Ended | Failed):
            conversation.home.release(number, _CLOSE_SECONDS)
        self._answer(conversation, reply)

    def lost(self, number: int, text: str) -> None:
        """Take note that a conversation's process is gone."""
        if (conversation := self._by_number.get(number)) is not None:
            self._answer(conversation, Failed(Failure("died", text)))

    # --- how it goes on ----------------------------------------------------------------------------------------------

    def _ask(self, key: int, request: Request) -> None:
        conversation = self._by_key[key]
        assert conversation.request is conversation.reply is None, f"conversation {key} has not been taken"
        conversation.request = request
        if conversation.failed is not None:  # its process is gone since
            self._answer(conversation, conversation.failed)
        else:
            self._send(conversation)

    def _send(self, conversation: Pooled) -> None:
        assert conversation.request is not None
        conversation.made = 0
        self._expect(conversation)
        conversation.home.ask(conversation.number, conversation.request, self._timeout)

    def _expect(self, conversation: Pooled) -> None:
        """Give a conversation's environment its time from now on, or its process the time to be there."""
        conversation.asked_at = self._active_at = time.monotonic()
        seconds = self._timeout + conversation.home.grace if conversation.has_begun else FORK_SECONDS
        conversation.deadline = conversation.asked_at + seconds
        heapq.heappush(self._deadlines, (conversation.deadline, conversation.number))

    def _answer(self, conversation: Pooled, reply: Reply) -> None:
        if isinstance(reply, Failed):
            conversation.failed = reply
        if isinstance(reply, Ended | Failed):
            conversation.is_placed = False
        if conversation.request is not None:
            self._active_at = time.monotonic()
            conversation.request, conversation.reply = None, reply

    def _forget(self, conversation: Pooled) -> None:
        del self._by_key[conversation.key]
        del self._by_number[conversation.number]
        if conversation in self._waiting:
            self._waiting.remove(conversation)

    def _pump(self, seconds: float, wanted: Pooled | None = None, patience: float = 0.0) -> None:
        """Take in what comes within ``seconds``, send what waits, and keep the deadlines.

        What has come already is taken in before anything is judged: nobody may have looked for long.
        """
        has_heard = self._hear(0.0)
        self._place(wanted, patience)
        if any(home.is_full for home in self._homes.values()):
            seconds = min(seconds, _FULL_SECONDS)
        elif self._deadlines:
            seconds = min(seconds, max(self._deadlines[0][0] - time.monotonic(), 0.0))
        self._hear(0.0 if has_heard else seconds)
        for home in self._homes.values():
            home.flush()
        self._end_late()

    def _hear(self, seconds: float) -> bool:
        """Take in what comes within ``seconds``, and say whether anything did."""
        keys = self._selector.select(seconds)
        for key, _ in keys:
            key.data()
        return bool(keys)

    def _place(self, wanted: Pooled | None, patience: float) -> None:
        """Start the conversations that wait, in their order, as long as there are places for them.

        An engine begins no more than there are places for. Of another caller the one that it waits for gets a place
        when nobody else is at work, even if there is none: the others may go on only once this one has.
        """
        if not self._waiting:
            return
        held = [c for c in self._by_key.values() if c.is_placed]
        forked = sum(isinstance(c.home, ForkedEnvironments) for c in held)
        is_stuck = time.monotonic() >= self._active_at + patience and not any(c.request for c in held)
        for conversation in [*self._waiting]:
            has_place = isinstance(conversation.home, SharedEnvironments) or forked < self._places
            if not has_place and not (conversation is wanted and is_stuck):
                continue
            if not conversation.home.is_ready:
                conversation.home.starting.waited_for()
                continue
            self._waiting.remove(conversation)
            conversation.is_placed = True
            conversation.has_begun = isinstance(conversation.home, SharedEnvironments)
            conversation.home.begin(conversation.number)
            self._send(conversation)
            forked += isinstance(conversation.home, ForkedEnvironments)

    def _end_late(self) -> None:
        """End the conversations that have had their time."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, number = heapq.heappop(self._deadlines)
            conversation = self._by_number.get(number)
            if conversation is None or conversation.request is None or conversation.deadline != deadline:
                continue
            if conversation.home.is_answering(number) and now < conversation.asked_at + 2 * self._timeout:
                conversation.deadline = now + _POLL_SECONDS  # it has answered, and the answer is on its way
                heapq.heappush(self._deadlines, (conversation.deadline, number))
                continue
            self._answer(conversation, Failed(conversation.lateness(self._timeout)))
            conversation.home.late(number)
