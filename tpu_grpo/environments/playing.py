"""One environment that is played, in its process: made, reset, asked for its tools or steps, and for what it is worth.

    played = Played(job, target)                            # once for all conversations of a process, or a fork server
    playing = Playing(played)
    reply = await playing.reply(Start(columns, seed))       # Answered with the first observation
    reply = await playing.reply(Act(action))                # Answered
    reply = await playing.reply(End())                      # Ended
    await playing.close()

Whatever the user's code does becomes a Reply: Failed, if it is neither an answer nor a tool's error.
"""

import inspect
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from tpu_grpo.environments.actions import Action, Answered, Ended, Failed, Message, Reply
from tpu_grpo.environments.adapters import adapter_for, own_options
from tpu_grpo.environments.adapters.adapter import Adapter, fitting, parameters_of
from tpu_grpo.environments.kept import keep
from tpu_grpo.environments.requests import Act, End, Job, Request, Start
from tpu_grpo.environments.tools import MOST_CALLS, called, described, not_made, resolved
from tpu_grpo.environments.values import WrongError, growing, number_of, observed_text, step_of, turn_rewards_of
from tpu_grpo.records.episode import Failure, FailureKind

_LONGEST_TRACE = 20_000


class Played:
    """What is the same in all conversations of an environment; processes that are forked find it worked out."""

    def __init__(self, job: Job, target: Any):
        self.job, self.target, self.options = job, target, own_options(job.loaded.options)
        self.adapter = adapter_for(target, job.loaded.options)
        self.tools = {schema["function"]["name"]: schema for schema in job.loaded.tools}
        for name in ("reset", *self.tools):
            if inspect.isfunction(method := getattr(target, name, None)):
                parameters_of(MethodType(method, self))  # which remembers them


class Playing:
    """An environment of one conversation."""

    def __init__(self, played: Played, went_on: Callable[[], None] = lambda: None):
        """Make nothing yet; ``went_on`` is called between the calls of a turn, each of which has its own time."""
        self._job, self._target, self._options = played.job, played.target, played.options
        self._adapter: Adapter | None = played.adapter(played.target, played.options) if played.adapter else None
        self._tools = played.tools
        self._instance: Any = None
        self._went_on = went_on
        self.made = 0
        """How many calls of the present turn have been made."""
        self._turns: list[int] = []
        """Of each turn so far, how long the list of ``get_turn_rewards`` was after it."""
        self._asked = ""

    async def reply(self, request: Request) -> Reply:
        """Do what is asked, and return what came of it."""
        try:
            match request:
                case Start():
                    return await self._start(request)
                case Act(action):
                    self.made = 0
                    answer = await (self._call(action) if self._adapter is None else self._step(self._adapter, action))
                    self._turns.append(len(await self._turn_rewards() or ()))
                    return answer
                case End():
                    return await self._end()
        except WrongError as error:
            return _failed("wrong", str(error))
        except MemoryError as error:
            return _failed("memory", f"took more memory than environment.memory_gb in {self._asked}", error)
        except SystemExit as error:
            return _failed("died", f"called sys.exit({error.code!r}) in {self._asked}{_line(error)}", error)
        except Exception as error:  # user code: anything can come
            return _failed("raised", f"raised {described(error)} in {self._asked}{_line(error)}", error)

    async def close(self) -> None:
        """Close the environment; raises what that raises."""
        if self._adapter is not None:
            await resolved(self._adapter.close())
        elif self._instance is not None and (close := self._method("close")) is not None:
            await resolved(close())

    async def _start(self, request: Start) -> Answered:
        random.seed(request.seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(request.seed % 2**32)
        self._asked = "reset"
        if self._adapter is not None:
            given = await resolved(self._adapter.start(request.columns, request.seed))
        else:
            self._asked = "its constructor"
            self._instance = self._target(**self._options)
            self._asked = "reset"
            reset = self._instance.reset
            given = await resolved(reset(**fitting(reset, request.columns, request.seed)))
        observation = given[0] if isinstance(given, tuple) and len(given) == 2 else given
        return Answered(_observed(observation, "reset"))

    async def _call(self, action: Action) -> Answered:
        messages, errors = [], 0
        for before, call in enumerate(action.calls[:MOST_CALLS]):
            if before:
                self.made = before
                self._went_on()
            self._asked = f"the tool {getattr(call, 'name', '')}"
            message, is_error = await called(self._instance, self._tools, call)
            messages.append(message)
            errors += is_error
        if left := action.calls[MOST_CALLS:]:
            messages.append(not_made(left))
            errors += len(left)
        return Answered(tuple(messages), errors=errors)

    async def _step(self, adapter: Adapter, action: Action) -> Answered:
        self._asked = "step"
        step = step_of(await resolved(adapter.step(action.text)))
        messages = _observed(step.observation, "step")
        if not messages and not step.done:
            messages = ({"role": "user", "content": ""},)  # nothing is to be seen, and the policy goes on
        return Answered(messages, step.reward, step.done)

    async def _end(self) -> Ended:
        reward, instance = None, self._played_instance
        if (get_reward := self._method("get_reward")) is not None:
            self._asked = "get_reward"
            reward = number_of(await resolved(get_reward()), "get_reward")
        given = await self._turn_rewards()
        turn_rewards = None if given is None else turn_rewards_of(given, self._turns)
        return Ended(reward, turn_rewards, keep(self._job.loaded.source, instance) if self._job.keep else None)

    @property
    def _played_instance(self) -> Any:
        return self._instance if self._adapter is None else self._adapter.instance

    def _method(self, name: str) -> Any:
        """Return a method that the class has, as it was seen when it was loaded: an instance may answer to any name."""
        return getattr(self._played_instance, name, None) if callable(getattr(self._target, name, None)) else None

    async def _turn_rewards(self) -> Sequence[Any] | None:
        """Ask for the rewards of the turns so far; None of a class without."""
        if (get_turn_rewards := self._method("get_turn_rewards")) is None:
            return None
        self._asked = "get_turn_rewards"
        return growing(await resolved(get_turn_rewards()), self._turns[-1] if self._turns else 0)


def _observed(observation: Any, giver: str) -> tuple[Message, ...]:
    text = observed_text(observation, giver)
    return ({"role": "user", "content": text},) if text else ()


def _failed(kind: FailureKind, text: str, error: BaseException | None = None) -> Failed:
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    return Failed(Failure(kind, text, trace[-_LONGEST_TRACE:]))


def _line(error: BaseException) -> str:
    """Name the innermost line that an exception comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
