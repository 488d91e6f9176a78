"""Tests play conversations with these."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import Action, Answered, BadCall, Ended, Reply, ToolCall
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.environments.pool import EnvironmentPool
from tpu_grpo.records.episode import Failure


def open_pool(name: str | dict[str, str], keep: bool = False, **settings: Any) -> closing[EnvironmentPool]:
    """A pool of environments by their names in a config, for a ``with`` block."""
    section = EnvironmentSection(name=name, **settings)
    loaded = {key: load_environment(one, section.options, key) for key, one in section.names.items()}
    return closing(EnvironmentPool(loaded, section, keep))


def calls(*made: ToolCall | BadCall) -> Action:
    """A turn that calls tools."""
    return Action(text="", content="", calls=made)


def call(name: str, **arguments: Any) -> Action:
    """A turn that calls one tool."""
    return calls(ToolCall(name, arguments))


def says(text: str) -> Action:
    """A turn that calls nothing."""
    return Action(text=text, content=text)


def begun(pool: EnvironmentPool, key: int = 0, columns: Mapping[str, Any] | None = None, name: str = "") -> Reply:
    pool.start(key, name, columns or {}, seed=7)
    return pool.take(key)


def acted(pool: EnvironmentPool, action: Action, key: int = 0) -> Reply:
    pool.act(key, action)
    return pool.take(key)


def ended(pool: EnvironmentPool, key: int = 0) -> Ended:
    pool.end(key)
    reply = pool.take(key)
    assert isinstance(reply, Ended), reply
    return reply


def answer(reply: Reply) -> Answered:
    """An answer, and nothing else."""
    assert isinstance(reply, Answered), reply
    return reply


def told(reply: Reply) -> str:
    """The text of an answer with at most one message."""
    messages = answer(reply).messages
    assert len(messages) <= 1
    return messages[0]["content"] if messages else ""


def failure(reply: Reply) -> tuple[str, str]:
    """How an environment failed, and the text."""
    assert isinstance(reply, Failure), reply
    return reply.kind, reply.text
