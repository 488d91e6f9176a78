"""Connects the engine to the environments of a batch of rows; each row has a conversation and an environment.

`Episodes` implements `Conversations` (tpu_grpo/engine/turns.py). While a row's environment works, the engine
decodes other rows:

    the engine calls     the environment runs       ``next(row)`` returns
    begin(row)           reset                      the Request of the first turn
    ended(row, turn)     its tools, or step         the Request of the next turn
                         get_reward at the end      None: the conversation is over
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import COLUMN, Answered, Ended, LoadedEnvironment, Reply
from tpu_grpo.environments.agent_conversation import AgentConversation
from tpu_grpo.environments.conversation import Conversation, Start
from tpu_grpo.environments.episode_record import EpisodeRecord, Replies, task_of
from tpu_grpo.environments.tool_values import WrongError
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError, without_controls
from tpu_grpo.records.short_texts import shortened
from tpu_grpo.records.stages import Completion, Prompt, Request, SampleKey

LOG = logging.getLogger("tpu_grpo.environments")
_SHOWN = 100
"""Errors show this many characters of the beginning, and as many of the end, of a long user message."""
if TYPE_CHECKING:
    from tpu_grpo.environments.chat_format import ChatFormat
    from tpu_grpo.environments.pool import EnvironmentPool


class Environments:
    """Makes the `Episodes` of a run's batches; ``close`` ends the processes of the environments.

    Args:
        loaded: the environments by their names in the data column `environment`; by "" if there is only one.
        chat_formats: the chat format of each environment, by the names in ``loaded``.
        pool: runs the environments.
    """

    def __init__(
        self,
        loaded: Mapping[str, LoadedEnvironment],
        chat_formats: Mapping[str, "ChatFormat"],
        pool: "EnvironmentPool",
        section: EnvironmentSection,
        max_prompt_tokens: int,
    ):
        self.loaded, self.chat_formats, self.section = loaded, chat_formats, section
        self.pool = pool
        self._max_prompt_tokens = max_prompt_tokens
        self.record: EpisodeRecord | None = None
        """The record to which the episodes of agents are written, and from which a continued run takes them."""

    def __call__(self, prompts: Sequence[Prompt], requests: Sequence[Request]) -> "Episodes":
        """Prepare a conversation for each row, from its prompt and from the request that says how to sample it."""
        names = ["" if "" in self.loaded else str(prompt.columns[COLUMN]) for prompt in prompts]
        starts = [
            Start(prompt, request, self.loaded[name], self.chat_formats[name], self.section, self._max_prompt_tokens)
            for prompt, request, name in zip(prompts, requests, names, strict=True)
        ]
        return Episodes(self, starts, names)

    def keep_record(self, directory: Path, host: int) -> None:
        """Write the episodes of agents to files of ``directory``, and take those that are there."""
        self.record = EpisodeRecord(directory, host)

    def forget(self, step: int) -> None:
        """Delete this host's records of ``step`` and of earlier steps."""
        if self.record is not None:
            self.record.forget(step)

    def describe(self) -> list[str]:
        """Say in a line for each environment what it offers the policy."""
        lines: list[str] = []
        for name, loaded in self.loaded.items():
            tools = ", ".join(tool["function"]["name"] for tool in loaded.tools)
            called = f"tools {tools}, called as {self.chat_formats[name].tool_format}" if tools else "answers to texts"
            lines.append(f"{name or loaded.name}: at most {self.section.max_turns} turns, {called}")
        return lines

    @property
    def places(self) -> int | None:
        """The most conversations on a host that may have their own processes at the same time; None for no limit."""
        has_processes = not all(environment.is_async for environment in self.loaded.values())
        return self.section.workers if has_processes and self.section.workers != "auto" else None

    def close(self) -> None:
        """End all environments and their processes."""
        self.pool.close()


class Episodes:
    """The conversations of a batch, from their beginnings to their ends."""

    def __init__(self, environments: Environments, starts: Sequence[Start], names: Sequence[str]):
        self.places, self._record, self._pool = environments.places, environments.record, environments.pool
        self._starts, self._names = starts, names
        self._open: dict[int, Conversation] = {}
        self._next: dict[int, Request | None] = {}
        """Row -> the request of its next turn, once that is known; None if the conversation is over."""
        self._out_since: dict[int, float] = {}
        self._seconds = [0.0] * len(starts)
        self._done: dict[int, Completion] = {}
        self._written: dict[int, tuple[str, Replies]] = {}
        """Row -> a digest of what its agent, which is running, was given, and the replies so far."""
        self._replayed: dict[int, Replies] = {}
        """Row -> the remaining recorded replies of an agent that is not run again."""
        self._has_failed = False

    def needs_place(self, row: int) -> bool:
        """Whether a row's environment needs a process of its own; the number of such processes is limited."""
        return not self._starts[row].environment.is_async

    def begin(self, row: int) -> None:
        """Start the environment of a row, without waiting for it."""
        start = self._starts[row]
        self._open[row] = (AgentConversation if start.environment.takes == "answers" else Conversation)(start)
        chosen = () if self._names[row] == "" else (COLUMN,)  # reset does not get the column `environment`
        columns = {name: value for name, value in start.prompt.columns.items() if name not in chosen}
        self._out_since[row] = time.perf_counter()
        if self._record is not None and start.environment.takes == "answers" and start.request.key.step:
            task = task_of(start.environment, columns)
            if (replies := self._record.replies(start.request.key, task)) is not None:
                self._replayed[row] = replies
                return
            self._written[row] = task, []
        self._pool.start(row, self._names[row], columns, seed_of(start.request.key))

    def ended(self, row: int, completion: Completion) -> None:
        """Send a turn to the row's environment, without waiting for its answer."""
        action = self._open[row].turn(completion)
        self._out_since[row] = time.perf_counter()
        if action is None:
            self._end(row)
        elif row not in self._replayed:
            self._pool.act(row, action)

    def stop(self, row: int) -> None:
        """End a conversation before the policy's next turn; ``next`` then returns None. Only
        tpu_grpo/cli/environment_episode.py calls this."""
        self._open[row].stop()
        self._out_since[row] = time.perf_counter()
        self._pool.end(row)

    def ready(self, row: int) -> bool:
        """Whether ``next`` would return without waiting."""
        while row not in self._next and (row in self._replayed or self._pool.ready(row)):
            self._take(row, self._reply(row))
        return row in self._next

    def next(self, row: int) -> Request | None:
        """Wait for the environment, and return the request of the row's next turn; None if the conversation is over.
        Raises EpisodeError for an environment that failed, if environment.on_error is stop."""
        while row not in self._next:
            self._take(row, self._reply(row))
        return self._next.pop(row)

    def result(self, row: int) -> Completion:
        """Return the completion that holds a row's whole conversation, which must be over."""
        return self._done[row]

    def messages(self, row: int) -> list[Mapping[str, Any]]:
        """Return a conversation so far, the prompt's messages first."""
        return self._open[row].messages

    def end_id(self, row: int) -> int:
        """Return the token that ends the turns of a row."""
        return self._starts[row].chat_format.end_id

    def close(self) -> None:
        """Discard conversations that are not over."""
        for row in [row for row in self._open if row not in self._done and row not in self._replayed]:
            self._pool.drop(row)
        self._open.clear()

    def _reply(self, row: int) -> Reply:
        """Return the environment's next reply: wait for it, or take it from the record."""
        if (replayed := self._replayed.get(row)) is not None:
            digest, reply = replayed.pop(0) if replayed else ("", None)
            if reply is None or digest != self._open[row].digest:
                assert self._record is not None
                raise self._record.refuse(self._starts[row].request.key)
            return reply
        reply = self._pool.take(row)
        if row in self._written:
            self._written[row][1].append((self._open[row].digest, reply))
        return reply

    def _end(self, row: int) -> None:
        """Request the rewards from the row's environment, unless the episode is replayed from the record."""
        if row not in self._replayed:
            self._pool.end(row)

    def _take(self, row: int, reply: Reply) -> None:
        """Handle a reply: store the request of the row's next turn, request the rewards, or end the conversation."""
        conversation = self._open[row]
        try:
            match reply:
                case Failure():
                    self._fail(row, reply)
                case Ended():
                    conversation.ended(reply)
                    self._finish(row)
                case Answered():
                    request = conversation.answered(reply) if conversation.began else conversation.first(reply)
                    if request is None:
                        self._end(row)
                    else:
                        self._next[row] = request
                        self._seconds[row] += time.perf_counter() - self._out_since.pop(row)
        except WrongError as error:
            if isinstance(reply, Answered) and row not in self._replayed:  # otherwise the environment has ended
                self._pool.drop(row)
            self._fail(row, Failure("wrong", str(error)))

    def _fail(self, row: int, failure: Failure) -> None:
        start, conversation = self._starts[row], self._open[row]
        where = _where(start.request.key, conversation.asked)
        if start.section.on_error == "stop":
            del self._open[row]
            raise EpisodeError(
                f"environment {start.environment.name} {failure.text}, {where}; repair it, or set environment.on_error "
                "to skip or value" + (f"\n{failure.trace}".rstrip() if failure.trace else "")
            )
        worth = start.section.error_value if start.section.on_error == "value" else None
        if not self._has_failed:
            LOG.warning(
                "environment %s %s, %s; %s, and further ones are not told here\n%s",
                start.environment.name,
                without_controls(failure.text),
                where,
                "it is left out" if worth is None else f"it is worth {worth:g}",
                without_controls(failure.trace),
            )
        self._has_failed = True
        conversation.failed(replace(failure, reward=worth))
        self._finish(row)

    def _finish(self, row: int) -> None:
        self._seconds[row] += time.perf_counter() - self._out_since.pop(row)
        done = self._done[row] = self._open[row].completion(self._seconds[row])
        self._next[row] = None
        has_failed = done.episode is None or done.episode.failure is not None  # not recorded, to be played again
        if self._record is not None and (written := self._written.pop(row, None)) is not None and not has_failed:
            self._record.write(self._starts[row].request.key, *written)


def seed_of(key: SampleKey) -> int:
    """Return the seed of an environment's random numbers: the same for all conversations of a prompt at a step."""
    return int(np.random.SeedSequence([key.seed, key.step, key.prompt]).generate_state(1)[0])


def _where(key: SampleKey, asked: str) -> str:
    """Describe a conversation by step or evaluation, prompt number and user message."""
    step = f"in step {key.step}" if key.step else "in an evaluation"
    shown = shortened(asked, _SHOWN, _SHOWN, " [...] ")
    return f"{step} with its prompt {key.prompt} (from 0), which asks {shown!r}"
