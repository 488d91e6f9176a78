"""All conversations of a batch: what each environment is asked, when the engine may go on, and how failures end."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.environments.test_conversation import ChatFormat, sampled, tool
from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import Action, Answered, Ended, LoadedEnvironment, Reply
from tpu_grpo.environments.episodes import Environments, Episodes, seed_of
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.records.stages import Prompt, Request, SampleKey, SamplingParams


class Pool:
    """Answers what the test has put there, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.replies: dict[int, list[Any]] = {}

    def start(self, key: int, name: str, columns: Mapping[str, Any], seed: int) -> None:
        self.asked.append(("start", key, name, dict(columns), seed))

    def act(self, key: int, action: Action) -> None:
        self.asked.append(("act", key, action.text))

    def end(self, key: int) -> None:
        self.asked.append(("end", key))

    def drop(self, key: int) -> None:
        self.asked.append(("drop", key))

    def ready(self, key: int) -> bool:
        return bool(self.replies.get(key))

    def take(self, key: int) -> Reply:
        return self.replies[key].pop(0)

    def close(self) -> None:
        self.asked.append("close")


def environments(pool: Pool, names: tuple[str, ...] = ("",), most: int = 6, **settings: Any) -> Environments:
    loaded = {name: LoadedEnvironment(name or "Game", f"{name}.py:Game", "calls") for name in names}
    section = EnvironmentSection(name="x", **settings)
    return Environments(loaded, dict.fromkeys(names, ChatFormat()), pool, section, most)  # pyrefly: ignore[bad-argument-type]


def opened(pool: Pool, rows: int = 1, **more: Any) -> Episodes:
    prompts = [Prompt("ask", (1, 2, 3), {"environment": "b", "target": row}) for row in range(rows)]
    requests = [Request((1, 2, 3), SamplingParams(20), SampleKey(7, 4, row, 0)) for row in range(rows)]
    return environments(pool, **more)(prompts, requests)


def acting(pool: Pool, turn: int = 100, **more: Any) -> Episodes:
    """The policy has taken its first turn in row 0."""
    episodes = opened(pool, **more)
    episodes.begin(0)
    pool.replies[0] = [Answered(())]
    episodes.next(0)
    episodes.ended(0, sampled(turn))
    return episodes


def test_a_row_goes_to_and_fro() -> None:
    pool = Pool()
    episodes = opened(pool)
    episodes.begin(0)
    assert not episodes.ready(0)
    pool.replies[0] = [Answered(())]
    assert episodes.ready(0)
    first: Any = episodes.next(0)
    assert first.token_ids == (1, 2, 3)
    assert not episodes.ready(0)  # it is the policy's turn
    episodes.ended(0, sampled(100))
    pool.replies[0] = [tool("x")]
    second = episodes.next(0)
    assert second is not None
    episodes.ended(0, sampled(9))  # calls nothing: the environment is asked for its reward at once
    pool.replies[0] = [Ended(reward=1.0)]
    assert episodes.ready(0)
    assert episodes.next(0) is None
    assert episodes.result(0).token_ids.tolist() == [100, 50, 1, 51, 9]
    key = SampleKey(7, 4, 0, 0)
    assert pool.asked == [
        ("start", 0, "", {"environment": "b", "target": 0}, seed_of(key)),
        ("act", 0, "100"),
        ("end", 0),
    ]
    episodes.close()
    assert len(pool.asked) == 3  # nothing is left to give up


def test_the_reward_is_asked_for_while_others_decode() -> None:
    """An answer after which the conversation is over brings the question for the reward with it."""
    pool = Pool()
    episodes = acting(pool)
    pool.replies[0] = [tool("x", done=True)]
    assert not episodes.ready(0)
    assert pool.asked[-1] == ("end", 0)
    pool.replies[0] = [Ended(reward=0.5)]
    assert episodes.ready(0)
    assert episodes.next(0) is None


def test_a_group_begins_alike_and_steps_differ() -> None:
    assert seed_of(SampleKey(7, 4, 2, 0)) == seed_of(SampleKey(7, 4, 2, 5))
    assert len({seed_of(SampleKey(7, step, prompt, 0)) for step in (1, 2) for prompt in (0, 1)}) == 4


def test_a_column_chooses_the_environment() -> None:
    pool = Pool()
    episodes = opened(pool, names=("a", "b"))
    episodes.begin(0)
    assert pool.asked[0][1:4] == (0, "b", {"target": 0})  # reset does not get the column that chose


@pytest.mark.parametrize(("on_error", "worth"), [("skip", None), ("value", -0.5)])
def test_a_failure_ends_its_conversation_alone(
    on_error: str, worth: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool()
    value = {"error_value": -0.5} if on_error == "value" else {}
    episodes = opened(pool, rows=2, on_error=on_error, **value)
    for row in range(2):
        episodes.begin(row)
        pool.replies[row] = [Answered(())]
        episodes.next(row)
        episodes.ended(row, sampled(100))
    pool.replies[0], pool.replies[1] = [Failure("late", "did not answer in 1 s")], [tool("x")]
    assert episodes.next(0) is None
    failed: Any = episodes.result(0).episode
    assert failed.failure == Failure("late", "did not answer in 1 s", reward=worth)
    assert episodes.next(1) is not None
    [told] = caplog.messages
    left = "it is left out" if worth is None else "it is worth -0.5"
    where = "in step 4 with its prompt 0 (from 0), which asks 'ask'"
    assert told.startswith(f"environment Game did not answer in 1 s, {where}; {left}")
    pool.replies[1] = [Failure("died", "exited with code 3")]
    episodes.ended(1, sampled(100))
    assert episodes.next(1) is None
    assert len(caplog.messages) == 1


def test_conversations_that_are_not_over_are_dropped() -> None:
    pool = Pool()
    episodes = opened(pool)
    episodes.begin(0)
    episodes.close()
    assert pool.asked[-1] == ("drop", 0)


def test_a_failure_may_end_the_run() -> None:
    pool = Pool()
    episodes = opened(pool)
    episodes.begin(0)
    pool.replies[0] = [Failure("raised", "raised KeyError: 'x' (game.py:3 in reset)", trace="Traceback ...")]
    with pytest.raises(EpisodeError) as caught:
        episodes.next(0)
    assert str(caught.value) == (
        "environment Game raised KeyError: 'x' (game.py:3 in reset), in step 4 with its prompt 0 (from 0), which asks "
        "'ask'; repair it, or set environment.on_error to skip or value\nTraceback ..."
    )
    episodes.close()
    assert pool.asked[-1][0] == "start"  # there is nothing to give up: the pool knows that it failed


def test_a_failure_says_which_conversation_it_is() -> None:
    """It shows what the user says last, with what reset gave: the system's message is that of all conversations."""
    pool = Pool()
    messages = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": f"{'a' * 99}bc"}]
    prompt = Prompt("s" * 300, (1, 2, 3), messages=messages)
    request = Request((1, 2, 3), SamplingParams(2000), SampleKey(7, 0, 5, 0))
    episodes = environments(pool, most=1000)([prompt], [request])
    episodes.begin(0)
    pool.replies[0] = [Answered(({"role": "user", "content": f"{'d' * 100}{'e' * 100}"},))]
    episodes.next(0)
    episodes.ended(0, sampled(100))
    pool.replies[0] = [Failure("died", "exited with code 3")]
    asked = f"{'a' * 99}b [...] {'e' * 100}"
    with pytest.raises(
        EpisodeError, match=re.escape(f"in an evaluation with its prompt 5 (from 0), which asks '{asked}'")
    ):
        episodes.next(0)


def test_a_reward_too_many_is_a_failure() -> None:
    pool = Pool()
    episodes = acting(pool, turn=9, on_error="skip")
    pool.replies[0] = [Ended(turn_rewards=(0.5, 0.5))]
    assert episodes.next(0) is None
    failed: Any = episodes.result(0).episode
    assert (failed.ending, failed.failure.kind) == ("failed", "wrong")
    assert pool.asked[-1] == ("end", 0)  # its process is free already


def test_a_first_prompt_that_is_too_long_is_a_failure() -> None:
    pool = Pool()
    episodes = opened(pool, on_error="skip", most=4)
    episodes.begin(0)
    pool.replies[0] = [Answered(({"role": "user", "content": "ab"},))]
    assert episodes.next(0) is None
    assert pool.asked[-1] == ("drop", 0)
    failed: Any = episodes.result(0).episode
    assert failed.failure.kind == "wrong"
    assert "at most data.max_prompt_tokens=4 tokens, got 5" in failed.failure.text


def test_only_environments_with_processes_of_their_own_need_places() -> None:
    assert environments(Pool()).places is None
    some = environments(Pool(), ("a", "b"), workers=3)
    assert some.places == 3
    some.loaded = {"a": replace(some.loaded["a"], is_async=True), "b": some.loaded["b"]}
    prompts = [Prompt("ask", (1, 2, 3), {"environment": name}) for name in "ab"]
    episodes = some(prompts, [Request((1, 2, 3), SamplingParams(20), SampleKey(7, 4, row, 0)) for row in range(2)])
    assert (episodes.places, [episodes.needs_place(row) for row in range(2)]) == (3, [False, True])
    some.loaded = {"a": some.loaded["a"]}
    assert some.places is None
