"""The data that is exchanged between the policy and an environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_grpo.records.episode import Failure, KeptEnvironment

Message = Mapping[str, Any]
COLUMN = "environment"
"""This column of the data chooses among several environments; ``reset`` does not get it."""
CUT = " [...]"
"""Marks the end of a text that was cut."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call that could be parsed."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class BadCall:
    """A tool call that could not be parsed."""

    problem: str
    """What is wrong with the call; the policy gets this text in place of a result."""


@dataclass(frozen=True)
class Action:
    """The policy's turn, parsed."""

    text: str
    """The whole text without special tokens."""
    content: str
    """The text without thinking and tool calls."""
    calls: tuple[ToolCall | BadCall, ...] = ()
    thinking: str = ""
    sampled: "SampledTurn | None" = None
    """The turn's tokens, for an environment that takes turns as answers to its requests."""


@dataclass(frozen=True)
class SampledTurn:
    """The tokens of a turn: what an agent that keeps tokens gets beside the text."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability in nats of each token of ``token_ids``."""
    is_cut: bool
    """Whether the turn reached its most tokens."""


@dataclass(frozen=True)
class Answered:
    """An environment's answer to the policy's turn, or to ``reset``."""

    messages: tuple[Mapping[str, str], ...]
    """The messages for the policy: {role: tool, name, content} for each call, or one {role: user, content}. ``reset``
    gives at most one message, of the role user."""
    reward: float | None = None
    done: bool = False
    errors: int = 0
    """The number of calls that raised an error or could not be parsed."""
    request: str | None = None
    """The next request of an agent, in JSON (environments/policy_requests.py); None for other environments."""


@dataclass(frozen=True)
class Ended:
    """The result of an environment when its episode is over."""

    reward: float | None = None
    """What ``get_reward`` returned, which may be None; also None if there is no such method."""
    turn_rewards: tuple[float, ...] | None = None
    """What ``get_turn_rewards`` returned, summed for each turn; None if there is no such method."""
    kept: KeptEnvironment | None = None


Reply = Answered | Ended | Failure
"""A Failure comes in place of the other two, and ends the conversation."""


@dataclass(frozen=True)
class LoadedEnvironment:
    """The description of an environment's class, which was found and checked; no instance of the class exists yet."""

    name: str
    """Its name in the config's table; the name of its class if it is the only environment."""
    source: str
    """Its class, as path.py:Class or package.module:Class."""
    takes: str
    """What it takes from the policy: "calls" of its tools, "texts" for its method ``step``, or "answers" to its own
    requests."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The JSON schemas of its tools, as chat templates take them: {type: function, function: {name, ...}}."""
    is_async: bool = False
    """Whether ``reset`` and all its tools (or ``step``) are async. If so, its conversations share a process and an
    event loop."""
    awaits: bool = False
    """Whether any of its methods is async."""
    gives_reward: bool = False
    """Whether it scores its episodes: by ``get_reward``, or by the sum of its turns' rewards."""
    gives_turn_rewards: bool = False
    """Whether it scores turns: by ``get_turn_rewards``, or by what ``step`` returns."""
    options: Mapping[str, Any] = field(default_factory=dict)
