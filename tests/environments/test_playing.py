"""One environment is played, in its process."""

import asyncio
import inspect

import pytest

from tests.environments.playing import call
from tpu_grpo.environments.actions import Answered
from tpu_grpo.environments.finding import find_environment
from tpu_grpo.environments.loading import load_environment
from tpu_grpo.environments.playing import Played, Playing
from tpu_grpo.environments.requests import Act, Job, Start


def test_what_methods_take_is_worked_out_before_a_process_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would need longer for it than for all else that it does."""
    loaded = load_environment("tests.environments.games:Counter", {})
    played = Played(Job(loaded, 2**30, keep=False), find_environment(loaded.source))

    def refused(*_: object) -> None:
        raise AssertionError("worked out again")

    monkeypatch.setattr(inspect, "signature", refused)
    playing = Playing(played)
    asked = (Start({"target": 2, "other": 1}, seed=1), Act(call("increment", step=2)), Act(call("increment", by=2)))
    replies = [asyncio.run(playing.reply(each)) for each in asked]
    assert [reply.messages[0]["content"] for reply in replies if isinstance(reply, Answered)] == [
        "Count to 2.",
        "2",
        "Error: increment has no argument 'by'; it takes: step, times",
    ]
