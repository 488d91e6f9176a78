"""Runs one environment in its process: builds and resets it, calls its tools or ``step``, and asks for its rewards.

    service = EnvironmentService(loaded, keep=False)        # once in a process, for all conversations
    service.set_up()
    session = EnvironmentSession(service)                   # one conversation
    reply = await session.reply(Start(columns, seed))       # Answered with the first observation
    reply = await session.reply(action)                     # Answered
    reply = await session.reply(End())                      # Ended
    await session.close()

Every outcome of the user's code becomes a Reply. A tool's error is part of an Answered; other errors become a Failure.
"""

import asyncio
import importlib
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

from tpu_grpo.environments.actions import Action, Answered, Ended, LoadedEnvironment, Message, Reply, ToolCall
from tpu_grpo.environments.adapter_classes import adapter_for
from tpu_grpo.environments.environment_classes import find_environment
from tpu_grpo.environments.tool_values import (
    MOST_CALLS,
    WrongError,
    adapters_of,
    called,
    described,
    growing,
    not_made,
    number_of,
    observed_text,
    parameters_of,
    resolved,
    step_of,
    turn_rewards_of,
)
from tpu_grpo.records.episode import Failure, FailureKind
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.attributes import keep
from tpu_grpo.workers.messages import Mode

_LONGEST_TRACE = 20_000


@dataclass(frozen=True)
class Start:
    """The request to build a new environment and call its ``reset``."""

    columns: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class End:
    """The request for the rewards of the episode, which ends it."""


Request = Start | Action | End
"""An Action is the request to carry out the policy's turn."""


class EnvironmentService:
    """An environment's class as a `Service` (tpu_grpo/workers/messages.py); holds what all its conversations share."""

    start = "imported"
    replies: tuple[type, ...] = (Answered, Ended, Failure)
    most_bytes = 2**26
    """64 MiB are enough: a reply holds at most 16 texts of 1 MiB, or attributes of at most 16 MiB together (see
    tpu_grpo/workers/attributes.py)."""

    def __init__(self, loaded: LoadedEnvironment, keep: bool, secrets: tuple[str, ...] = ()):
        """``keep`` says whether ``Ended`` contains the attributes of the environment."""
        self.loaded, self.keep, self.secrets = loaded, keep, secrets
        self.name = f"environment {loaded.name}"
        self.mode: Mode = "shared" if loaded.is_async else "per_session"

    def set_up(self) -> None:
        """Import the environment's class, and the packages in ``_imported_before`` of a shipped class; otherwise each
        conversation would spend seconds on importing the packages. Raises EpisodeError if an import fails."""
        self.target, loaded = find_environment(self.loaded.source), self.loaded
        for name in getattr(self.target, "_imported_before", ()):
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise EpisodeError(f"the environment needs the package {name}, got {error}; install it") from error
        self.adapter, self.options = adapter_for(self.target, loaded.options)
        self.tools = {schema["function"]["name"]: schema for schema in loaded.tools}
        for name in ("reset", *self.tools):
            if inspect.isfunction(method := getattr(self.target, name, None)):
                parameters_of(MethodType(method, self))  # fills its cache
                _ = name in self.tools and adapters_of(method)

    @contextmanager
    def answering(self, went_on: Callable[[], None]) -> Iterator[Callable[[Request, float], Reply]]:
        """Yield a function that answers a conversation's requests in order; close the environment at the end."""
        session = EnvironmentSession(self, went_on)
        with asyncio.Runner() if self.loaded.awaits else nullcontext() as runner:
            run = _now if runner is None else runner.run

            def answer(request: Request, _: float) -> Reply:
                try:
                    return run(session.reply(request))
                except WrongError as error:
                    return Failure("wrong", str(error))

            yield answer
            run(session.close())

    def session(self, went_on: Callable[[], None]) -> "EnvironmentSession":
        """Begin a conversation."""
        return EnvironmentSession(self, went_on)


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits, because the class has no async methods. Raises WrongError if
    the coroutine does wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise WrongError("must declare methods whose results have to be awaited with async def, got one without; add it")


def late(request: Request, takes: str, seconds: float, made: int = 0) -> Failure:
    """Return the failure of an environment that did not answer in time, after ``made`` finished calls of the turn."""
    match request:
        case Start():
            asked = "its constructor and reset"
        case End():
            asked = "get_reward"
        case Action() if takes == "answers":
            asked = "its next request or its end"
        case Action(calls=calls) if takes == "calls" and calls:
            call = calls[made]
            asked = f"the tool {call.name}" if isinstance(call, ToolCall) else "a call that cannot be read"
        case _:
            asked = "step"
    return Failure("late", f"did not answer within its timeout of {seconds:g} s in {asked}")


class EnvironmentSession:
    """The environment of one conversation, and its state."""

    def __init__(self, service: EnvironmentService, went_on: Callable[[], None] = lambda: None):
        """Do not build the environment yet: the request `Start` does. ``went_on`` is called when a turn's next tool
        call begins, and restarts the timeout."""
        self._service, self._target = service, service.target
        self._adapter = service.adapter(service.target, service.options)
        self._went_on = went_on
        self.made = 0  # finished calls of the current turn
        self._turns: list[int] = []
        """The length of the list that ``get_turn_rewards`` returned after each turn so far."""
        self._asked = ""

    async def reply(self, request: Request) -> Reply:
        """Carry out a request, and return the reply."""
        try:
            match request:
                case Start():
                    return await self._start(request)
                case Action():
                    self.made = 0
                    answer = await (self._call(request) if self._adapter.takes == "calls" else self._step(request))
                    self._turns.append(len(await self._turn_rewards() or ()))
                    return answer
                case End():
                    return await self._end()
        except WrongError as error:
            return _failed("wrong", str(error))
        except MemoryError as error:
            return _failed("memory", f"took more memory than environment.memory_gb in {self._place}", error)
        except SystemExit as error:
            return _failed("died", f"called sys.exit({error.code!r}) in {self._place}{_line(error)}", error)
        except (Exception, asyncio.CancelledError) as error:  # user code can raise anything
            return _failed("raised", f"raised {described(error)} in {self._place}{_line(error)}", error)

    def late(self, request: Request, seconds: float) -> Failure:
        """Return the reply to a request whose timeout of ``seconds`` ran out."""
        return late(request, self._service.loaded.takes, seconds, self.made)

    async def close(self) -> None:
        """Close the environment; raises whatever its ``close`` raises."""
        await resolved(self._adapter.close())

    async def _start(self, request: Start) -> Answered:
        random.seed(request.seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(request.seed % 2**32)
        self._asked = "reset"
        given = await resolved(self._adapter.start(request.columns, request.seed))
        if isinstance(given, Answered):
            return given
        observation = given[0] if isinstance(given, tuple) and len(given) == 2 else given
        return Answered(_observed(observation, "reset"))

    async def _call(self, action: Action) -> Answered:
        messages, errors = [], 0
        for before, call in enumerate(action.calls[:MOST_CALLS]):
            if before:
                self.made = before
                self._went_on()
            self._asked = f"the tool {getattr(call, 'name', '')}"
            message, is_error = await called(self._adapter.instance, self._service.tools, call)
            messages.append(message)
            errors += is_error
        if left := action.calls[MOST_CALLS:]:
            messages.append(not_made(left))
            errors += len(left)
        return Answered(tuple(messages), errors=errors)

    async def _step(self, action: Action) -> Answered:
        self._asked = "step"
        text = action.content if getattr(self._target, "_strips_thinking", False) else action.text
        returned = await resolved(self._adapter.step(action if self._adapter.takes == "answers" else text))
        if isinstance(returned, Answered):
            return returned
        observation, reward, done = step_of(returned)
        messages = _observed(observation, "step")
        if not messages and not done:
            messages = ({"role": "user", "content": ""},)  # the policy goes on without an observation
        return Answered(messages, reward, done)

    async def _end(self) -> Ended:
        reward, instance = None, self._adapter.instance
        if (get_reward := self._method("get_reward")) is not None:
            self._asked = "get_reward"
            reward = number_of(await resolved(get_reward()), "get_reward")
        given = await self._turn_rewards()
        turn_rewards = None if given is None else turn_rewards_of(given, self._turns)
        return Ended(reward, turn_rewards, keep(self._service.loaded.source, instance) if self._service.keep else None)

    @property
    def _place(self) -> str:
        """What was asked of the environment last, for messages."""
        return self._asked if self._adapter.instance is not None else "its constructor"

    def _method(self, name: str) -> Any:
        """Return the instance's method ``name``; None if its class does not define this method."""
        return getattr(self._adapter.instance, name, None) if callable(getattr(self._target, name, None)) else None

    async def _turn_rewards(self) -> Sequence[Any] | None:
        """Return the rewards of the turns so far; None if the class has no ``get_turn_rewards``."""
        if (get_turn_rewards := self._method("get_turn_rewards")) is None:
            return None
        self._asked = "get_turn_rewards"
        return growing(await resolved(get_turn_rewards()), self._turns[-1] if self._turns else 0)


def _observed(observation: Any, giver: str) -> tuple[Message, ...]:
    text = observed_text(observation, giver)
    return ({"role": "user", "content": text},) if text else ()


def _failed(kind: FailureKind, text: str, error: BaseException | None = None) -> Failure:
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    return Failure(kind, text, trace[-_LONGEST_TRACE:])


def _line(error: BaseException) -> str:
    """Return the innermost line of an exception's traceback, for an error message."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
