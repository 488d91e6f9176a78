"""One environment is played, in its process."""

import asyncio
import inspect
from typing import Any

import pytest

from tests.environments.playing import call
from tpu_grpo.environments.actions import Answered, Ended
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.environments.environment_worker import End, EnvironmentService, EnvironmentSession, Start
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.attributes import rebuilt


def test_what_methods_take_is_worked_out_before_a_process_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would need longer for it than for all else that it does."""
    loaded = load_environment("tests.environments.games:Counter", {})
    service = EnvironmentService(loaded, keep=False)
    service.set_up()

    def refused(*_: object) -> None:
        raise AssertionError("worked out again")

    monkeypatch.setattr(inspect, "signature", refused)
    session = EnvironmentSession(service)
    asked = (Start({"target": 2, "other": 1}, seed=1), call("increment", step=2), call("increment", by=2))
    replies = [asyncio.run(session.reply(each)) for each in asked]
    assert [reply.messages[0]["content"] for reply in replies if isinstance(reply, Answered)] == [
        "Count to 2.",
        "2",
        "Error: increment has no argument 'by'; it takes: step, times",
    ]


class AnyName:
    """Answers to any name, as stand-ins and wrappers do; only what the class itself has is asked."""

    def reset(self) -> None:
        self.asked = list[str]()

    def look(self) -> str:
        """Look."""
        return "here"

    def __getattr__(self, name: str) -> Any:
        if name == "asked":
            raise AttributeError(name)
        return lambda *_: self.asked.append(name) or "no number"


def test_an_instance_that_answers_to_any_name_gives_no_rewards_of_its_own() -> None:
    loaded = load_environment(f"{__name__}:AnyName", {})
    assert not loaded.gives_reward
    service = EnvironmentService(loaded, keep=True)
    service.set_up()
    session = EnvironmentSession(service)

    async def play() -> Any:
        await session.reply(Start({}, seed=1))
        await session.reply(call("look"))
        return await session.reply(End())

    reply = asyncio.run(play())
    asyncio.run(session.close())
    assert isinstance(reply, Ended)
    assert (reply.reward, reply.turn_rewards) == (None, None)
    assert reply.kept is not None
    assert rebuilt(reply.kept, EpisodeError).asked == []
