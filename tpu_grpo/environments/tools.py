"""Environments in the manner of TRL: an instance whose public methods are tools.

A tool that raises, and a call that cannot be made, become a message to the policy, which begins with ``Error:``.
"""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from tpu_grpo.environments.actions import BadCall, Message, ToolCall
from tpu_grpo.environments.adapters.adapter import parameters_of
from tpu_grpo.environments.values import WrongError, cut_text, text_of

AT_THE_END = ("get_reward", "get_turn_rewards", "close")
"""Methods that are called when the conversation is over."""
RESERVED = ("reset", *AT_THE_END)
"""Public methods with these names are no tools."""
MOST_CALLS = 16
"""Of a turn no more calls are made; any more are answered together, with an error."""
_LONGEST_ERROR = 2000


class CallError(Exception):
    """A call that cannot be made; the policy is told why."""


async def resolved(value: Any) -> Any:
    """Return a value, or what it is if it is awaited."""
    return await value if isinstance(value, Awaitable) else value


async def called(instance: Any, tools: Mapping[str, Any], call: ToolCall | BadCall) -> tuple[Message, bool]:
    """Make a call; return the message with its result, and whether it went wrong.

    Raises:
        WrongError: if the tool returned what is no text.
        MemoryError: if it needed more memory than it may have.
    """
    name = call.name if isinstance(call, ToolCall) else ""
    try:
        method, arguments = _found(instance, tools, call)
        text = text_of(await resolved(method(**arguments)), f"the tool {name}")
    except (MemoryError, WrongError):
        raise
    except CallError as error:
        return _message(name, f"Error: {error}"), True
    except Exception as error:  # user code: anything can come
        return _message(name, f"Error: {described(error)}"), True
    return _message(name, cut_text(text)), False


def not_made(calls: Sequence[ToolCall | BadCall]) -> Message:
    """Return the message to a turn that has more calls than are made, of which these are left."""
    first = calls[0].name if isinstance(calls[0], ToolCall) else ""
    return _message(first, f"Error: a turn may make at most {MOST_CALLS} calls; {len(calls)} more were not made")


def described(error: BaseException) -> str:
    """Return an exception's type and text, which may be cut."""
    try:
        text = str(error)
    except Exception:  # user code: anything can come
        text = "its text cannot be had"
    text = text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _message(name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "content": content}


def _found(instance: Any, tools: Mapping[str, Any], call: ToolCall | BadCall) -> tuple[Any, Mapping[str, Any]]:
    """Return the method that a call means, and its arguments."""
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
    return method, call.arguments
