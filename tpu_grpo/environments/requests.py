"""What the pool asks a process with an environment, and what the process says of itself.

A Reply of actions.py answers each of Start, Act and End.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_grpo.environments.actions import Action, LoadedEnvironment, ToolCall
from tpu_grpo.records.episode import Failure


@dataclass(frozen=True)
class Start:
    """Make a new environment, and call its ``reset``."""

    columns: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Act:
    """Do what the policy wrote in its turn."""

    action: Action


@dataclass(frozen=True)
class End:
    """Say what the episode is worth."""


Request = Start | Act | End


@dataclass(frozen=True)
class Job:
    """What a process is for."""

    loaded: LoadedEnvironment
    memory_bytes: int
    keep: bool


@dataclass(frozen=True)
class Ready:
    """A process's first message: its class is imported."""


@dataclass(frozen=True)
class SetupFailed:
    """A process's last message: its class could not be imported."""

    text: str
    trace: str = ""


@dataclass(frozen=True)
class Began:
    """The first message of a process that has been forked for a conversation, whose time runs from here."""


@dataclass(frozen=True)
class Called:
    """A call of a turn is made, and the next one begins; a Reply follows the last."""


@dataclass(frozen=True)
class Fork:
    """Have a process for conversation ``number``; its socket comes along."""

    number: int


@dataclass(frozen=True)
class Finish:
    """End the process of conversation ``number`` if it has not ended by itself in so many seconds."""

    number: int
    seconds: float


@dataclass(frozen=True)
class Exited:
    """The process of conversation ``number`` is gone."""

    number: int
    text: str
    """How it ended, in words."""
    forced: bool
    """Whether it had to be ended."""


def asked(request: Request, takes: str, made: int = 0) -> str:
    """Say in words what an environment was asked, and of a turn's calls which comes after so many that were made."""
    match request:
        case Start():
            return "its constructor and reset"
        case End():
            return "get_reward"
        case Act(action) if takes == "calls" and action.calls:
            call = action.calls[made]
            return f"the tool {call.name}" if isinstance(call, ToolCall) else "a call that cannot be read"
        case _:
            return "step"


def late(request: Request, takes: str, seconds: float, made: int = 0) -> Failure:
    """Say that an environment did not answer in time, after so many calls of its turn."""
    return Failure("late", f"did not answer within its timeout of {seconds:g} s in {asked(request, takes, made)}")
