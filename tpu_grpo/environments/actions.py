"""What passes between the policy's turns and an environment.

Action      what the policy wrote in a turn, read: its text, and the tools that it called
Answered    what the environment answered to it, or to the call of ``reset``
Ended       what the environment said when its episode was over
Failed      what it did instead of either
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_grpo.records.episode import Failure, KeptEnvironment

Message = Mapping[str, Any]
COLUMN = "environment"
"""This column of the data chooses among several environments; ``reset`` does not get it."""
CUT = " [...]"
"""Stands after a text of which the rest is left out."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call that could be read."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be read."""

    problem: str
    """What is wrong with it, as the policy is told."""


@dataclass(frozen=True)
class Action:
    """The policy's turn, as it was read."""

    text: str
    """All of it, special tokens left out."""
    content: str
    """The text without thinking and tool calls."""
    calls: tuple[ToolCall | BadCall, ...] = ()
    thinking: str = ""


@dataclass(frozen=True)
class Answered:
    """What an environment answered."""

    messages: tuple[Mapping[str, str], ...]
    """What is put to the policy: {role: tool, name, content} for each call, or {role: user, content}; after ``reset``
    one of the role user, or none."""
    reward: float | None = None
    done: bool = False
    errors: int = 0
    """How many of the calls raised, or could not be read."""


@dataclass(frozen=True)
class Ended:
    """The result of an environment when its episode is over."""

    reward: float | None = None
    """What ``get_reward`` gave; None if there is no such method."""
    turn_rewards: tuple[float, ...] | None = None
    """What ``get_turn_rewards`` gave, a number for each turn; None if there is no such method."""
    kept: KeptEnvironment | None = None


@dataclass(frozen=True)
class Failed:
    """A failure of an environment; its process, and so the conversation, has ended."""

    failure: Failure


Reply = Answered | Ended | Failed


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment that was found and checked, before any conversation."""

    name: str
    """Its name in the config's table; that of its class, if there is only one."""
    source: str
    """Its class, as path.py:Class or package.module:Class."""
    takes: str
    """"calls" of tools, or "texts", which go to its method ``step``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The JSON schemas of its tools, as chat templates take them: {type: function, function: {name, ...}}."""
    is_async: bool = False
    """Whether ``reset``, and all its tools or ``step``, have to be awaited. Then its conversations share a process, and
    an event loop."""
    awaits: bool = False
    """Whether any of its methods has to be awaited."""
    gives_reward: bool = False
    """Whether it scores its episodes: by ``get_reward``, or by what its turns are worth, added up."""
    gives_turn_rewards: bool = False
    """Whether it scores turns: by ``get_turn_rewards``, or by what ``step`` returns."""
    options: Mapping[str, Any] = field(default_factory=dict)
