"""Calls the tools of users' environments, and converts what their methods return into texts and rewards."""

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Awaitable, Mapping, Sequence
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from tpu_grpo.environments.actions import CUT, BadCall, Message, ToolCall
from tpu_grpo.records.errors import LARGEST_REWARD
from tpu_grpo.records.short_texts import shortened

AT_THE_END = ("get_reward", "get_turn_rewards", "close")
"""Methods that are called at the end of a conversation; get_turn_rewards also after each turn."""
RESERVED = ("reset", *AT_THE_END)
"""Public methods with these names are not tools."""
MOST_CALLS = 16
"""The most calls that are made in one turn; the policy gets one error message for all further calls."""
_LONGEST_ERROR = 2000


class CallError(Exception):
    """A call that cannot be made; the policy gets the message as the call's result."""


async def resolved(value: Any) -> Any:
    """Return a value, or the result of awaiting it if it is awaitable."""
    return await value if isinstance(value, Awaitable) else value


async def called(instance: Any, tools: Mapping[str, Any], call: ToolCall | BadCall) -> tuple[Message, bool]:
    """Make a call; return the message with its result, and whether the call failed.

    Raises:
        WrongError: if the tool returned a value that has no text.
        MemoryError: if the tool needed more memory than is allowed.
    """
    name = call.name if isinstance(call, ToolCall) else ""
    try:
        method, arguments = _found(instance, tools, call)
        text = text_of(await resolved(method(**arguments)), f"the tool {name}")
    except (MemoryError, WrongError):
        raise
    except CallError as error:
        return _message(name, f"Error: {error}"), True
    except Exception as error:  # user code can raise anything
        return _message(name, f"Error: {described(error)}"), True
    return _message(name, cut_text(text)), False


def not_made(calls: Sequence[ToolCall | BadCall]) -> Message:
    """Return the message for the calls of a turn beyond its limit."""
    first = calls[0].name if isinstance(calls[0], ToolCall) else ""
    return _message(first, f"Error: a turn may make at most {MOST_CALLS} calls; {len(calls)} more were not made")


def described(error: BaseException) -> str:
    """Return an exception's type and message, shortened to _LONGEST_ERROR characters."""
    try:
        text = str(error)
    except Exception:  # user code can raise anything
        text = "its text cannot be had"
    text = shortened(text, _LONGEST_ERROR)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _message(name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "content": content}


def _found(instance: Any, tools: Mapping[str, Any], call: ToolCall | BadCall) -> tuple[Any, Mapping[str, Any]]:
    """Return the method that a call names, and the arguments, as its type hints want them. Raises CallError if the call
    does not fit a tool."""
    if isinstance(call, BadCall):
        raise CallError(call.problem)
    if call.name not in tools:
        raise CallError(f"there is no tool {call.name!r}; the tools are: {', '.join(tools)}")
    method = getattr(instance, call.name)
    parameters = parameters_of(method)
    named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes = f"it takes: {', '.join(named)}" if named else "it takes none"
    unknown = [name for name in call.arguments if name not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise CallError(f"{call.name} has no argument {unknown[0]!r}; {takes}")
    if missing := [n for n, p in named.items() if p.default is p.empty and n not in call.arguments]:
        raise CallError(f"{call.name} needs the argument {missing[0]!r}; {takes}")
    adapters = adapters_of(getattr(method, "__func__", method))
    return method, {n: _fitted(n, value, adapters.get(n)) for n, value in call.arguments.items()}


@functools.lru_cache(maxsize=256)
def adapters_of(function: Any) -> Mapping[str, TypeAdapter[Any]]:
    """Return what converts JSON values to the type hints of a function."""
    found = {}
    for name, hint in get_type_hints(function).items():
        with contextlib.suppress(PydanticUserError):  # a subclass of dict, which gets what the policy wrote
            found[name] = TypeAdapter(hint)
    return found


def _fitted(name: str, value: Any, adapter: TypeAdapter[Any] | None) -> Any:
    """Convert an argument to its type hint: "4" or 4.0 to 4, "[1, 2]" to a list, but not "4" where text fits, nor true
    to 1. Raises CallError for an argument that does not fit."""
    if adapter is None:
        return value
    written, problem = json.dumps(value), ""
    tries = [(written, True), *([(value, True)] if isinstance(value, str) else []), (written, False)]
    for text, strict in tries[: 1 if isinstance(value, bool) else None]:
        try:
            found = adapter.validate_json(text, strict=strict)
            json.dumps(found, allow_nan=False, default=list)  # raises for infinity, which "1e400" becomes
        except ValueError as error:
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        else:
            return found
    raise CallError(f"the argument {name!r} does not fit: {problem}, got {value!r:.80}")


MOST_BYTES = 2**20
"""A longer observation is refused, and a longer result of a tool is cut."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
"""Matches the default repr of objects, such as ``<Game object at 0x7f12>``."""


class WrongError(Exception):
    """An environment returned an invalid value; the message is phrased to follow the environment's name."""


def text_of(value: Any, giver: str) -> str:
    """Return the text of a value; in errors, ``giver`` names the function that returned it, such as "the tool add".

    Raises:
        WrongError: for bytes, and for an object whose text is its address in memory, which varies between runs.
        Exception: whatever str() raises, such as ValueError for a number of more digits than Python writes.
    """
    text = value if isinstance(value, str) else _blocks(value)
    if text is None:
        text = str(value)
        if isinstance(value, bytes | bytearray | memoryview) or _ADDRESS.search(text):
            raise WrongError(f"must give a text, or what has one, got {_shown(value)} from {giver}; return a str")
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair has no UTF-8 encoding, and so no tokens


def cut_text(text: str) -> str:
    """Return the text, cut to its first MOST_BYTES bytes."""
    data = text.encode()
    if len(data) <= MOST_BYTES:
        return text
    return data[: MOST_BYTES - len(CUT)].decode(errors="ignore") + CUT


def _plain(value: Any) -> Any:
    """Convert numpy numbers and arrays to Python numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _blocks(value: Any) -> str | None:
    """Return the text of a list of content blocks, {type: text, text: ...}; None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(block, Mapping) and block.get("type") == "text" for block in value):
        return None
    return "".join(str(block.get("text", "")) for block in value)


def number_of(value: Any, giver: str) -> float | None:
    """Return a number as a float, and None as None. Raises WrongError for anything else, including NaN and numbers
    beyond LARGEST_REWARD; the error names ``giver``, the function that returned the value."""
    if value is None:
        return None
    number = _plain(value)
    if not isinstance(number, int | float) or not abs(number) <= LARGEST_REWARD:
        raise WrongError(
            f"must give a finite number or None, got {_shown(value)} from {giver}; correct what it returns, which may "
            f"be at most {LARGEST_REWARD:g}"
        )
    return float(number)


def turn_rewards_of(value: Any, lengths: Sequence[int]) -> tuple[float, ...]:
    """Return a reward for each turn that the environment answered, and one for a last turn without calls, if any.

    A class cannot tell which calls belong to the same turn, and is not called for a turn whose calls could not be made.
    So the numbers that each turn added to the list are summed. ``turn_rewards_of([1, 2, 3], [0, 2])`` is (0, 3, 3): the
    first turn added nothing, the second 1 and 2, and the last 3. Raises WrongError for any other value.

    Args:
        value: the list that ``get_turn_rewards`` returned at the end.
        lengths: the length of that list after each answered turn. If all are 0, ``value`` has one number per turn.
    """
    values = growing(value, 0)
    rewards = [number_of(number, "get_turn_rewards") or 0.0 for number in values]
    if not rewards:
        return (0.0,) * len(lengths)
    if any(lengths) and lengths[-1] <= len(rewards):
        parts = [sum(rewards[begin:end], 0.0) for begin, end in pairwise([0, *lengths])]
        return (*parts, *([sum(rewards[lengths[-1] :], 0.0)] if len(rewards) > lengths[-1] else []))
    if len(rewards) not in (len(lengths), len(lengths) + 1):
        raise WrongError(
            f"must give a list to which turns add, or of {len(lengths)} numbers in the end, one for each turn that it "
            f"answered (one more for a last turn that called nothing), got {_shown(value)} from get_turn_rewards"
        )
    return tuple(rewards)


def growing(value: Any, least: int) -> Sequence[Any]:
    """Return the list that ``get_turn_rewards`` returned. Raises WrongError if it is no list, or is shorter than
    ``least``, the list's length after the previous turn."""
    values = _plain(value)
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < least:
        raise WrongError(
            f"must give a list of numbers, to which turns add, of {least} at least, got {_shown(value)} from "
            "get_turn_rewards; correct what it returns"
        )
    return values


def step_of(value: Any) -> tuple[Any, float | None, bool]:
    """Split the result of a method ``step`` into the observation, the reward, and whether the episode is over.

    The result may be ``(observation, reward, done, info)``, ``(observation, reward, terminated, truncated, info)``, or
    a mapping or an object with observation, reward and done. Raises WrongError for any other result.
    """
    match value:
        case (observation, reward, done, Mapping() | None):
            pass
        case (observation, reward, terminated, truncated, Mapping() | None):
            done = terminated or truncated
        case {"observation": observation, "reward": reward, "done": done}:
            pass
        case _ if all(hasattr(value, name) for name in ("observation", "reward", "done")):
            observation, reward, done = value.observation, value.reward, value.done
        case _:
            raise WrongError(
                "must return (observation, reward, done, info), (observation, reward, terminated, truncated, info), a "
                f"dict or an object with observation, reward and done, got {_shown(value)} from step"
            )
    return observation, number_of(reward, "step"), bool(done)


def observed_text(observation: Any, giver: str) -> str:
    """Return the text of an observation; messages are joined, and None becomes the empty text. Raises WrongError for
    an observation without a text or with more than MOST_BYTES, and whatever str() raises."""
    is_list = isinstance(observation, list)
    if observation is None or (isinstance(observation, list | tuple | dict) and not observation):
        text = ""
    elif is_list and all(isinstance(m, Mapping) and "content" in m for m in observation):
        text = "\n".join(text_of(message["content"], giver) for message in observation)
    else:
        text = text_of(observation, giver)
    if (size := len(text.encode())) > MOST_BYTES:
        raise WrongError(f"must give at most {MOST_BYTES:,} bytes of text at once, got {size:,} from {giver}; cut it")
    return text


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except Exception:  # user code can raise anything
        shown = "an object whose repr raises"
    return f"{type(value).__name__} {shortened(shown, 200)}"


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; for methods, the result is cached once per class."""
    if inspect.ismethod(function) and inspect.isfunction(function.__func__):
        return _parameters_of_method(function.__func__)
    return inspect.signature(function).parameters


@functools.lru_cache(maxsize=256)
def _parameters_of_method(function: FunctionType) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function that is bound to an instance."""
    return inspect.signature(MethodType(function, object())).parameters
