"""The data that is exchanged between the policy and an environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_grpo.records.episode import Failure, KeptEnvironment

Message = Mapping[str, Any]
COLUMN = "environment"
"""With several environments, this data column names the environment of a row, and is not passed to ``reset``."""
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
    """A turn of the policy, parsed."""

    text: str
    """The whole text without special tokens."""
    content: str
    """The text without thinking and tool calls."""
    calls: tuple[ToolCall | BadCall, ...] = ()
    thinking: str = ""
    sampled: "SampledTurn | None" = None
    """The turn's tokens, for an environment that is an agent; None for other environments."""

    @property
    def message(self) -> dict[str, Any]:
        """The turn as chat templates take it, with the calls that could be parsed."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in self.calls
            if isinstance(call, ToolCall)
        ]
        return message | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True)
class SampledTurn:
    """The tokens of a turn, which the HTTP response to an agent can contain in addition to the text."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability in nats of each token of ``token_ids``."""
    is_cut: bool
    """Whether the turn reached its token limit."""
    pieces: tuple[bytes, ...] = ()
    """The bytes of each token of ``token_ids``; empty unless the request asks for log-probabilities."""
    likeliest: tuple[tuple[tuple[int, bytes, float], ...], ...] = ()
    """For each token the likeliest tokens in its place as (id, bytes, log-probability), the likeliest first; empty
    unless the request asks for them."""


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
    """An agent's next request, in JSON (tpu_grpo/environments/policy_requests.py); None if the agent has ended, and for
    other environments."""


@dataclass(frozen=True)
class Ended:
    """What an environment returns at the end of its episode: rewards, and its attributes if rewards read them."""

    reward: float | None = None
    """The result of ``get_reward``, which may be None; also None if there is no such method."""
    turn_rewards: tuple[float, ...] | None = None
    """The rewards from ``get_turn_rewards``, summed per turn; None if there is no such method. A last turn
    without calls may lack one."""
    kept: KeptEnvironment | None = None


Reply = Answered | Ended | Failure
"""Instead of Answered or Ended, an environment can reply with a Failure, which ends the conversation."""


@dataclass(frozen=True)
class LoadedEnvironment:
    """The description of an environment class that has been found and checked. No instance exists yet."""

    name: str
    """The environment's name in the config's table, or the name of its class if it is the only environment."""
    source: str
    """The class, as path.py:Class or package.module:Class."""
    takes: str
    """What the environment takes from the policy: "calls" of tools, "texts" for ``step``, or "answers", which are turns
    that an agent has requested."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The JSON schemas of the tools, in the form for chat templates: {type: function, function: {name, ...}}."""
    is_async: bool = False
    """Whether ``reset`` and all tools (or ``step``) are async. If so, many conversations share a process and its event
    loop."""
    awaits: bool = False
    """Whether any method is async."""
    gives_reward: bool = False
    """Whether the environment scores episodes: by ``get_reward``, or by the sum of the turns' rewards."""
    gives_turn_rewards: bool = False
    """Whether the environment scores turns: by ``get_turn_rewards``, or by what ``step`` returns."""
    requires: tuple[str, ...] = ()
    """The columns that ``reset`` requires."""
    options: Mapping[str, Any] = field(default_factory=dict)
