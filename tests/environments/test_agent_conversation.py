"""What an agent's requests become: tokens that were seen go on as they are, anything else opens a branch."""

import time
from typing import Any

import numpy as np
import pytest

from tests.environments.template_families import ADD, chat_format, ids
from tpu_grpo.config import EnvironmentSection
from tpu_grpo.environments.actions import Answered, Ended, LoadedEnvironment, ToolCall
from tpu_grpo.environments.agent_conversation import AgentConversation
from tpu_grpo.environments.conversation import BRANCH_SAMPLES, Start
from tpu_grpo.environments.policy_requests import TurnRequest
from tpu_grpo.environments.tool_values import WrongError
from tpu_grpo.records.stages import Completion, Prompt, Request, SampleKey, SamplingParams

KEY = SampleKey(7, 4, 2, 5)
OPEN = "<|im_start|>assistant\n"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def written(text: str) -> str:
    """A user's message and the opening of a turn, as Qwen 2.5 writes them after a turn's end."""
    return f"\n<|im_start|>user\n{text}<|im_end|>\n{OPEN}"


def asked(*messages: dict[str, Any], **more: Any) -> Answered:
    return Answered((), request=TurnRequest(messages=messages, **more).for_one())


def tokens(*prompt: int, **more: Any) -> Answered:
    return Answered((), request=TurnRequest(token_ids=prompt, **more).for_one())


def conversation(family: str = "qwen2_5", most: int = 400, **settings: Any) -> Any:
    """An `AgentConversation`; as Any, because every answer of it may be None."""
    prompt = Prompt("never read", (1, 2, 3), messages=[user("never read")])
    section = EnvironmentSection(name="agent", **settings)
    start = Start(
        prompt,
        Request(prompt.token_ids, SamplingParams(most, temperature=0.5), KEY),
        LoadedEnvironment("Agent", "agent.py:Agent", "answers", gives_reward=True),
        chat_format(family, ()),
        section,
        max_prompt_tokens=400,
    )
    return AgentConversation(start)


def said(text: str, family: str = "qwen2_5", reason: Any = "stop", end: str = "<|im_end|>") -> Completion:
    sampled = ids(family, text + end * (reason == "stop"))
    return Completion(np.array(sampled, np.int32), -np.arange(1.0, len(sampled) + 1, dtype=np.float32), reason, 0)


def test_a_request_that_adds_to_what_was_sampled_continues_its_tokens() -> None:
    """The turn is sampled as the two tokens 4 and 7, which the tokenizer would write as one."""
    talk = conversation()
    first = talk.first(asked(user("2+45=")))
    assert (list(first.token_ids), first.key) == (talk._start.chat_format.prompt([user("2+45=")]), KEY)
    turn = Completion(
        np.array([*map(ord, "47"), *ids("qwen2_5", "<|im_end|>")], np.int32),
        np.array([-1, -2, -3], np.float32),
        "stop",
        0,
    )
    action = talk.turn(turn)
    assert (action.content, action.sampled.token_ids, action.sampled.logprobs) == (
        "47",
        (*turn.token_ids,),
        (-1, -2, -3),
    )
    assert (action.sampled.prompt_ids, action.sampled.is_cut) == (first.token_ids, False)
    second = talk.answered(asked(user("2+45="), assistant("47"), user("and 1?")))
    added = ids("qwen2_5", written("and 1?"))
    assert list(second.token_ids) == [*first.token_ids, *turn.token_ids, *added]
    assert second.key == KEY
    talk.turn(said("48"))
    assert talk.answered(Answered((), done=True)) is None
    talk.ended(Ended(reward=0.5))
    whole = talk.completion()
    [branch] = whole.episode.branches
    assert (branch.prompt, branch.start, branch.end) == (first.token_ids, 0, 3 + len(added) + 3)
    assert whole.sampled.tolist() == [True] * 3 + [False] * len(added) + [True] * 3
    assert (whole.episode.reward, whole.episode.ending) == (0.5, "done")
    assert [t.answer for t in whole.episode.turns] == ["and 1?", ""]
    assert whole.episode.messages == (user("2+45="), assistant("47"), user("and 1?"), assistant("48"))[1:]


def test_the_same_prompt_again_is_a_branch_with_its_own_random_numbers() -> None:
    talk = conversation()
    first = talk.first(asked(user("2+45=")))
    talk.turn(said("47"))
    again = talk.answered(asked(user("2+45=")))
    assert again.token_ids == first.token_ids
    assert again.key == SampleKey(7, 4, 2, 5 + BRANCH_SAMPLES)
    talk.turn(said("46"))
    talk.answered(Answered((), done=True))
    branches = talk.completion().episode.branches
    assert [(branch.prompt, branch.start, branch.end) for branch in branches] == [
        (first.token_ids, 0, 2),
        (first.token_ids, 2, 5),
    ]


def test_two_seats_continue_their_own_tokens_in_turn() -> None:
    """One seat asks, the other answers, and the first goes on: its past is the tokens it has seen."""
    talk = conversation()
    first = talk.first(asked(user("ask")))
    talk.turn(said("who?"))
    other = talk.answered(asked(user("answer who?")))
    assert other.key.sample == 5 + BRANCH_SAMPLES
    talk.turn(said("me"))
    on = talk.answered(asked(user("ask"), assistant("who?"), user("me")))
    assert list(on.token_ids) == [*first.token_ids, *ids("qwen2_5", "who?<|im_end|>" + written("me"))]
    talk.turn(said("good"))
    talk.answered(Answered((), done=True))
    branches = talk.completion().episode.branches
    assert [branch.prompt for branch in branches] == [first.token_ids, other.token_ids, on.token_ids]
    assert [branch.end - branch.start for branch in branches] == [5, 3, 5]


def test_what_nobody_sampled_is_rendered_anew() -> None:
    """The agent writes another turn into the past, then a turn that was cut cannot be continued."""
    talk = conversation()
    talk.first(asked(user("2+45=")))
    talk.turn(said("47"))
    rewritten = (user("2+45="), assistant("46"), user("no"))
    changed = talk.answered(asked(*rewritten))
    assert list(changed.token_ids) == talk._start.chat_format.prompt(rewritten)
    talk.turn(said("4", reason="length"))
    cut = (*rewritten, assistant("4"), user("go on"))
    assert list(talk.answered(asked(*cut)).token_ids) == talk._start.chat_format.prompt(cut)


def test_a_template_that_drops_thinking_begins_a_branch() -> None:
    talk = conversation("qwen3")
    first = talk.first(asked(user("2+45=")))
    action = talk.turn(said("<think>\nhm\n</think>\n\n47", "qwen3"))
    assert (action.content, action.thinking) == ("47", "hm")
    second = talk.answered(asked(user("2+45="), assistant("47"), user("sure?")))
    assert list(second.token_ids) == [*first.token_ids, *ids("qwen3", "47<|im_end|>" + written("sure?"))]
    assert second.key.sample == 5 + BRANCH_SAMPLES
    talk.turn(said("yes", "qwen3"))
    talk.answered(Answered((), done=True))
    whole = talk.completion()
    assert whole.episode.turns[0].observed == len(ids("qwen3", written("sure?")))
    heard = [*ids("qwen3", "<think>\nhm\n</think>\n\n47<|im_end|>" + written("sure?") + "yes<|im_end|>")]
    assert whole.conversation_ids.tolist() == heard


def test_tools_are_those_of_the_request() -> None:
    talk = conversation()
    first = talk.first(asked(user("2+45="), tools=(ADD,)))
    with_tool = chat_format("qwen2_5", (ADD,))
    assert list(first.token_ids) == with_tool.prompt([user("2+45=")])
    action = talk.turn(said('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 45}}\n</tool_call>'))
    assert [vars(call)["name"] for call in action.calls] == ["add"]
    made = {"type": "function", "function": {"name": "add", "arguments": {"b": 45, "a": 2}}}
    told = {"role": "tool", "name": "add", "content": "47"}
    second = talk.answered(asked(user("2+45="), {**assistant(""), "tool_calls": [made]}, told, tools=(ADD,)))
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert second.key == KEY
    talk.turn(said("47"))
    without = talk.answered(asked(user("2+45=")))
    assert list(without.token_ids) == chat_format("qwen2_5", ()).prompt([user("2+45=")])


def test_texts_of_an_agent_cannot_spell_special_tokens() -> None:
    talk = conversation()
    request = talk.first(asked(user("x<|im_end|>y")))
    end = ids("qwen2_5", "<|im_end|>")[0]
    assert request.token_ids.count(end) == chat_format("qwen2_5", ()).prompt([user("xy")]).count(end)
    talk.turn(said("z"))
    made = {
        "type": "function",
        "function": {"name": "<|im_end|>", "arguments": {"<|im_end|>": 1, "role": "<|im_end|>"}},
    }
    more = talk.answered(asked(user("x<|im_end|>y"), assistant("z"), {**user("w"), "tool_calls": [made]}))
    assert more.token_ids.count(end) == request.token_ids.count(end) + 2  # the turn's and the new message's


def test_the_policy_calls_a_tool_whose_name_spells_a_special_token() -> None:
    talk = conversation()
    tool = {"type": "function", "function": {"name": "x<tool_call>", "parameters": {"properties": {}}}}
    talk.first(asked(user("u"), tools=(tool,)))
    [call] = talk.turn(said('<tool_call>\n{"name": "x<tool_call>", "arguments": {}}\n</tool_call>')).calls
    assert call == ToolCall("x<tool_call>", {})


def test_tokens_in_tokens_out() -> None:
    talk = conversation()
    first = talk.first(tokens(*ids("qwen2_5", "2+45=")))
    assert list(first.token_ids) == ids("qwen2_5", "2+45=")
    talk.turn(said("47"))
    past = [*first.token_ids, *ids("qwen2_5", "47<|im_end|>")]
    second = talk.answered(tokens(*past, 65, 66))
    assert (list(second.token_ids), second.key) == ([*past, 65, 66], KEY)
    talk.turn(said("x"))
    third = talk.answered(tokens(*past, 67))
    assert (list(third.token_ids), third.key.sample) == ([*past, 67], 5 + BRANCH_SAMPLES)
    with pytest.raises(WrongError, match=r"token ids must be from 0 to \d+, got 99999"):
        talk.answered(tokens(99999))


def test_a_request_can_only_end_a_turn_earlier() -> None:
    talk = conversation(most=30)
    assert talk.first(asked(user("a"), max_tokens=7)).sampling.max_new_tokens == 7
    talk.turn(said("b"))
    assert talk.answered(asked(user("a"), max_tokens=1000)).sampling.max_new_tokens == 28
    assert talk._start.request.sampling.temperature == 0.5


def test_a_stop_text_ends_the_turn_behind_its_last_token() -> None:
    talk = conversation()
    talk.first(asked(user("a"), stop=("END", "zz")))
    action = talk.turn(said("one END two"))
    assert (action.content, action.text) == ("one", "one ")
    assert list(action.sampled.token_ids) == ids("qwen2_5", "one END")
    assert action.sampled.logprobs == tuple(-float(n) for n in range(1, 8))
    assert not action.sampled.is_cut


def test_a_conversation_ends_by_turns_and_by_tokens() -> None:
    talk = conversation(max_turns=1)
    talk.first(asked(user("a")))
    talk.turn(said("b"))
    assert talk.answered(asked(user("c"))) is None
    assert talk.completion().episode.ending == "turns"
    talk = conversation(most=20)
    talk.first(asked(user("a")))
    talk.turn(said("b"))
    assert talk.answered(asked(user("a"), assistant("b"), user("c" * 20))) is None
    assert talk.completion().episode.ending == "tokens"
    talk = conversation(most=2)
    talk.first(asked(user("a")))
    talk.turn(said("bc", reason="length"))
    assert talk.answered(Answered((), done=True)) is None  # an agent of one turn, which was cut
    assert talk.completion().finish_reason == "length"


def test_a_stop_token_ends_the_turn_and_tokens_are_named_by_their_bytes() -> None:
    talk = conversation()
    talk.first(asked(user("a"), stop_ids=(ord("d"),), logprobs=True))
    action = talk.turn(said("n\u00e9d.d"))
    assert list(action.sampled.token_ids) == ids("qwen2_5", "n\u00e9d")
    assert action.sampled.pieces == (b"n", b"\xc3", b"\xa9", b"d")


@pytest.mark.parametrize(
    "giant",
    [
        asked(user("a"), assistant("b"), user("x" * 15 * 2**20)),
        asked(user("a"), assistant("b"), user("x" * 200_000)),
        asked(user("a"), user(" x" * 100_000)),
        asked(user("a"), assistant("<|im_end|>" * 20_000)),
        asked(user("a"), tools=({**ADD, "function": {**ADD["function"], "description": "x" * 200_000}},)),
        Answered((), request=TurnRequest(text="x" * 200_000).for_one()),
    ],
    ids=["15 MiB", "added", "prompt", "markers", "tools", "text"],
)
def test_a_giant_request_ends_the_conversation_before_it_is_tokenized(giant: Answered) -> None:
    """Tokenizing the first of them takes a minute and 3 GB; what it added to the past was not looked at before."""
    talk = conversation()
    talk.first(asked(user("a")))
    talk.turn(said("b"))
    began = time.monotonic()
    assert talk.answered(giant) is None
    assert time.monotonic() - began < 5.0
    assert talk.completion().episode.ending == "tokens"
    with pytest.raises(WrongError, match="must ask with a prompt that the policy can read: .* must have at most"):
        conversation().first(giant)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Answered((), done=True), "must ask the policy for at least one turn"),
        (asked(user("x" * 500)), "must begin with a prompt of 1 to data.max_prompt_tokens=400 tokens, got 5"),
        (tokens(), "must begin with a prompt of 1 to data.max_prompt_tokens=400 tokens, got 0"),
    ],
)
def test_an_agent_that_cannot_begin(reply: Answered, message: str) -> None:
    with pytest.raises(WrongError, match=message):
        conversation("llama3").first(reply)
