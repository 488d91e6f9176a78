"""A conversation's tokens, worked out by hand: what was sampled stays as it was, and only grows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import Action, Answered, BadCall, Ended, LoadedEnvironment, ToolCall
from tpu_grpo.environments.conversation import BRANCH_SAMPLES, Conversation, Start, shares
from tpu_grpo.environments.tool_values import WrongError
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.stages import Completion, Prompt, Request, SampleKey, SamplingParams

PROMPT = Prompt("ask", (1, 2, 3), messages=[{"role": "user", "content": "ask"}])
KEY = SampleKey(7, 4, 2, 5)


@dataclass
class Following:
    suffix: tuple[int, ...]
    new_prompt: tuple[int, ...] | None = None


class ChatFormat:
    """Tokens of 100 and above call tools; an answer is written as 50, its length, 51."""

    def __init__(self, forgets: bool = False):
        self._forgets, self.encoder = forgets, self
        self.followed: list[tuple[list[int], int, list[bool]]] = []

    def first(self, messages: Any, observation: str) -> tuple[str, list[int], list[Any]]:
        told = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + observation}]
        return f"ask{observation}", [1, 2, 3, *[4] * len(observation)], told

    def read(self, ids: Sequence[int]) -> Action:
        calls = tuple(BadCall("bad") if i == 199 else ToolCall(f"t{i}", {"x": i}) for i in ids if i >= 100)
        return Action(" ".join(map(str, ids)), "content", calls)

    def follow(self, ids: list[int], first: int, sampled: list[bool], answers: Any) -> Following:
        self.followed.append((list(ids), first, list(sampled)))
        suffix = tuple(token for message in answers for token in (50, len(message["content"]), 51))
        return Following(suffix, (1, 2, 3, *ids[-1:]) if self._forgets else None)

    def ends(self, ids: Sequence[int]) -> bool:
        return ids[-1] != 99

    def count(self, text: str) -> int:
        return len(text)

    def shortened(self, text: str, most: int) -> str:
        return f"{text[: most - 1]}~" if most else ""


def conversation(chat_format: ChatFormat | None = None, takes: str = "calls", most: int = 20, **settings: Any) -> Any:
    """A `Conversation`; as Any, because every answer of it may be None."""
    request = Request(PROMPT.token_ids, SamplingParams(most, temperature=0.5), KEY)
    section = EnvironmentSection(name="x", **settings)
    loaded = LoadedEnvironment("x", "x.py:X", takes)
    return Conversation(Start(PROMPT, request, loaded, chat_format or ChatFormat(), section, max_prompt_tokens=6))  # pyrefly: ignore[bad-argument-type]


def begun(chat_format: ChatFormat | None = None, **settings: Any) -> Any:
    """A conversation whose reset gave nothing."""
    talk = conversation(chat_format, **settings)
    talk.first(Answered(()))
    return talk


def sampled(*ids: int, reason: Any = "stop", **more: Any) -> Completion:
    return Completion(np.array(ids, np.int32), -np.arange(1, len(ids) + 1, dtype=np.float32), reason, 0, **more)


def tool(*texts: str, **more: Any) -> Answered:
    return Answered(tuple({"role": "tool", "name": "t", "content": text} for text in texts), **more)


def test_three_turns_token_by_token() -> None:
    chat_format = ChatFormat()
    talk = conversation(chat_format)
    first = talk.first(Answered(()))
    assert first == Request((1, 2, 3), SamplingParams(20, temperature=0.5), KEY)
    assert talk.turn(sampled(10, 100)) == Action("10 100", "content", (ToolCall("t100", {"x": 100}),))
    second = talk.answered(tool("abcd"))
    assert second == Request((1, 2, 3, 10, 100, 50, 4, 51), SamplingParams(15, temperature=0.5), KEY)
    assert talk.turn(sampled(101, 102)) is not None
    third = talk.answered(tool("a", "bb", errors=1))
    assert third.token_ids == (1, 2, 3, 10, 100, 50, 4, 51, 101, 102, 50, 1, 51, 50, 2, 51)
    assert third.sampling.max_new_tokens == 20 - 13
    assert talk.turn(sampled(11, 12)) is None  # no tool was called
    talk.ended(Ended(reward=0.5))
    found = talk.completion(1.5)
    assert found.token_ids.tolist() == [10, 100, 50, 4, 51, 101, 102, 50, 1, 51, 50, 2, 51, 11, 12]
    assert found.sampled.astype(int).tolist() == [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert found.logprobs.tolist() == [-1, -2, 0, 0, 0, -1, -2, 0, 0, 0, 0, 0, 0, -1, -2]
    assert (found.finish_reason, found.sampled_tokens, found.kept) == ("stop", 6, None)
    episode = found.episode
    assert [(t.start, t.end, t.calls, t.answer, t.observed, t.errors) for t in episode.turns] == [
        (0, 2, ("t100",), "abcd", 3, 0),
        (5, 7, ("t101", "t102"), "a\nbb", 6, 1),
        (13, 15, (), "", 0, 0),
    ]
    assert [(b.prompt, b.start, b.end) for b in episode.branches] == [((1, 2, 3), 0, 15)]
    assert (episode.ending, episode.reward, episode.prompt, episode.seconds) == ("answered", 0.5, "ask", 1.5)
    assert [m["role"] for m in episode.messages] == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert episode.messages[0]["tool_calls"] == [
        {"type": "function", "function": {"name": "t100", "arguments": {"x": 100}}}
    ]
    # what was followed is what there was, to the token
    assert chat_format.followed[1] == (
        [1, 2, 3, 10, 100, 50, 4, 51, 101, 102],
        3,
        [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2,
    )


def test_what_reset_gives_is_a_part_of_the_prompt() -> None:
    talk = conversation()
    first = talk.first(Answered(({"role": "user", "content": "12"},)))
    assert first.token_ids == (1, 2, 3, 4, 4)
    assert first.sampling.max_new_tokens == 20  # all of it is left
    assert talk.messages == [{"role": "user", "content": "ask12"}]  # as the chat format put it
    assert PROMPT.messages[0]["content"] == "ask"
    with pytest.raises(WrongError, match="at most data.max_prompt_tokens=6 tokens, got 7"):
        conversation().first(Answered(({"role": "user", "content": "1234"},)))


def test_a_template_that_forgets_begins_another_branch() -> None:
    talk = begun(ChatFormat(forgets=True), takes="texts", most=9)
    assert talk.turn(sampled(10, 11)) is not None
    second = talk.answered(Answered(({"role": "user", "content": "no"},), reward=0.25))
    assert second.token_ids == (1, 2, 3, 11, 50, 2, 51)  # 12 may follow the first prompt: 3 + 9
    assert second.sampling.max_new_tokens == 3 + 9 - 7
    assert second.key == SampleKey(7, 4, 2, 5 + BRANCH_SAMPLES)  # its positions come again
    assert talk.turn(sampled(12)) is not None
    assert talk.answered(Answered((), reward=0.5, done=True)) is None
    talk.ended(Ended())
    found = talk.completion()
    assert found.token_ids.tolist() == [10, 11, 12]
    assert found.sampled.all()
    assert [(b.prompt, b.start, b.end) for b in found.episode.branches] == [
        ((1, 2, 3), 0, 2),
        ((1, 2, 3, 11, 50, 2, 51), 2, 3),
    ]
    assert [turn.observed for turn in found.episode.turns] == [3, 0]  # 50, 2 and 51, in that prompt
    assert (found.episode.ending, found.episode.reward) == ("done", 0.75)  # what its turns gave


def test_tokens_that_a_branch_forgot_count_for_the_limit_of_the_whole_conversation() -> None:
    """Of 8 tokens 6 are written in the first turn; the second branch sees 7 where 11 may stand, and still gets 2."""
    talk = begun(ChatFormat(forgets=True), takes="texts", most=8)
    assert talk.turn(sampled(10, 11, 12, 13, 14, 15)) is not None
    second = talk.answered(Answered(({"role": "user", "content": "no"},)))
    assert (second.token_ids, second.sampling.max_new_tokens) == ((1, 2, 3, 15, 50, 2, 51), 2)
    assert talk.turn(sampled(16, 17)) is not None
    assert talk.answered(Answered(({"role": "user", "content": "no"},))) is None
    found = talk.completion()
    assert found.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert (found.episode.ending, len(found.episode.branches)) == ("tokens", 2)


@pytest.mark.parametrize(
    ("settings", "turns", "ending", "reason", "tokens"),
    [
        ({"max_turns": 1}, [(100,)], "turns", "length", 1),
        ({"most": 6}, [(10, 100)], "tokens", "length", 2),  # 2 and 3 for the answer would leave 1: one more turn
        ({"most": 5}, [(10, 100)], "tokens", "length", 2),  # no room behind the answer, so it is left out
    ],
)
def test_where_a_conversation_ends(settings: Any, turns: Any, ending: str, reason: str, tokens: int) -> None:
    talk = begun(**settings)
    for ids in turns:
        assert talk.turn(sampled(*ids)) is not None
    request = talk.answered(tool("abcd"))
    if settings == {"most": 6}:
        assert request.sampling.max_new_tokens == 1
        assert talk.turn(sampled(10, reason="length")) is None
        tokens += 4
    else:
        assert request is None
    talk.ended(Ended(reward=0.0))
    found = talk.completion()
    assert (found.episode.ending, found.finish_reason, len(found.token_ids)) == (ending, reason, tokens)
    assert found.episode.turns[0].answer == "abcd"


def test_a_turn_may_have_fewer_tokens() -> None:
    talk = conversation(max_turn_tokens=4)
    first = talk.first(Answered(()))
    assert first.sampling.max_new_tokens == 4
    assert talk.turn(sampled(10, 100, 12, 13, reason="length")) is None  # cut: nothing can follow
    talk.ended(Ended())
    found = talk.completion()
    assert (found.episode.ending, found.episode.reward) == ("tokens", None)
    assert found.episode.turns[0].calls == ()  # the call in it was not made


def test_behind_another_end_token_nothing_can_be_written() -> None:
    talk = begun()
    assert talk.turn(sampled(100, 99)) is None
    talk.ended(Ended())
    found = talk.completion()
    assert found.episode.ending == "answered"


def test_long_answers_are_cut() -> None:
    talk = begun(max_observation_tokens=6)
    talk.turn(sampled(100, 101))
    talk.answered(tool("abcdef", "ab"))
    assert talk.messages[-2]["content"] == "abc~"  # two answers share six tokens, of which the other needs two
    assert talk.messages[-1]["content"] == "ab"


def test_an_empty_answer_is_one() -> None:
    talk = begun(takes="texts")
    talk.turn(sampled(10))
    request = talk.answered(Answered(({"role": "user", "content": ""},), reward=0.5))
    assert request.token_ids == (1, 2, 3, 10, 50, 0, 51)


@pytest.mark.parametrize(
    ("wanted", "most", "given"),
    [
        ([2, 8, 4], 9, [2, 4, 3]),
        ([2, 8, 4], 14, [2, 8, 4]),
        ([5, 5], 7, [3, 4]),
        ([1, 1, 1], 2, [0, 1, 1]),
        ([0, 3, *[6] * 6], 6, [0, 0, 1, 1, 1, 1, 1, 1]),
        ([9], 4, [4]),
        ([], 4, []),
    ],
)
def test_short_answers_leave_their_room_to_long_ones(wanted: list[int], most: int, given: list[int]) -> None:
    assert shares(wanted, most) == given


def test_rewards_of_turns() -> None:
    talk = begun()
    talk.turn(sampled(100))
    talk.answered(tool("x"))
    talk.turn(sampled(9))
    talk.ended(Ended(reward=1.0, turn_rewards=(0.25, 0.5)))
    found = talk.completion()
    assert [turn.reward for turn in found.episode.turns] == [0.25, 0.5]
    assert found.episode.reward == 1.0


@pytest.mark.parametrize(
    ("turns", "given", "rewards", "total"),
    [
        ([(100,), (100,), (9,)], (0.25, 0.5), [0.25, 0.5, 0.0], 0.75),
        ([(9,)], (), [0.0], 0.0),
        ([(100,), (9,)], (0.25, -1.0), [0.25, -1.0], -0.75),
    ],
)
def test_a_last_turn_that_adds_no_reward_stays(
    turns: list[tuple[int, ...]], given: tuple[float, ...], rewards: list[float], total: float
) -> None:
    talk = begun()
    for ids in turns:
        if talk.turn(sampled(*ids)) is not None:
            talk.answered(tool("x"))
    talk.ended(Ended(turn_rewards=given))
    episode = talk.completion().episode
    assert [turn.reward for turn in episode.turns] == rewards
    assert (episode.last_words, episode.reward) == ("9", total)


def test_a_turn_that_there_was_not_has_no_reward() -> None:
    """The last turn was answered, so that there is none beside those that the environment knows of."""
    talk = begun(max_turns=1)
    talk.turn(sampled(100))
    assert talk.answered(tool("x")) is None
    with pytest.raises(WrongError, match="a list of 1 numbers, one for each turn, got 2 from get_turn_rewards"):
        talk.ended(Ended(turn_rewards=(0.25, 0.5)))


def test_a_failed_environment_gives_no_reward() -> None:
    talk = begun()
    talk.turn(sampled(100))
    talk.failed(Failure("late", "did not answer", reward=-1.0))
    found = talk.completion()
    assert found.episode.failure is not None
    assert (found.episode.ending, found.episode.reward, found.token_ids.tolist()) == ("failed", None, [100])


def test_one_that_fails_at_once_has_no_tokens() -> None:
    talk = conversation()
    talk.failed(Failure("raised", "raised"))
    found = talk.completion()
    assert found.token_ids.tolist() == []
    assert found.episode.branches == ()


def test_kept_counts_stay_beside_their_tokens() -> None:
    talk = begun()
    talk.turn(sampled(100, kept=np.array([3], np.int32)))
    talk.answered(tool("x"))
    talk.turn(sampled(9, kept=np.array([5], np.int32)))
    talk.ended(Ended())
    found = talk.completion()
    assert found.kept.tolist() == [3, 0, 0, 0, 5]
