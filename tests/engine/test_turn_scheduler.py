"""Conversations: when rows are due, and what hosts that drive one replica tell each other.

In an engine every turn is what a plain request for it would give, and no delay changes a bit.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from flax import nnx
from pydantic import TypeAdapter
from sgl_jax.srt.managers.schedule_batch import global_config

from tests.engine.building import (
    PROMPTS,
    SAMPLED,
    alone,
    assert_alike,
    build_engine,
    build_replicas,
    engine_options,
    requests,
    tokens,
)
from tests.engine.scripted import Delay, Played, Script, ScriptedConversations, at_once, script
from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.generation import Finished
from tpu_grpo.engine.replicas import Replicas
from tpu_grpo.engine.scheduler import SteppedScheduler
from tpu_grpo.engine.turns import Limits
from tpu_grpo.environments.turn_scheduler import TurnScheduler, Wave
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import LockstepError, RequestError
from tpu_grpo.records.stages import Completion, Request

ROWS = requests(prompts=[(1, 2, 3)], group=4)
SCRIPTS = [Script((9,), (2, 2), ((5, 6),)), Script((9,), (2, 2), ((7,),)), Script((9,), (2,), ()), Script((9,), (), ())]


def turn(*tokens: int) -> Completion:
    return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "length", 0)


def scripted() -> ScriptedConversations:
    return ScriptedConversations(ROWS, SCRIPTS)


def ids(wave: Mapping[int, Request | None]) -> dict[int, tuple[int, ...] | None]:
    return {row: None if request is None else request.token_ids for row, request in wave.items()}


def test_rows_come_back_in_order_when_they_are_due() -> None:
    conversations = scripted()
    waves = TurnScheduler(conversations, Limits(tool_steps=16))
    assert (waves.out, waves.next_due) == ([], None)
    waves.begin([2, 0], clock=0)
    waves.begin([1, 3], clock=5)
    waves.tell()
    assert (waves.out, waves.next_due) == ([2, 0, 1, 3], 16)
    assert waves.take(15) == {}
    wave = waves.take(20)
    assert list(wave) == [0, 2]
    assert ids(wave) == {0: (1, 2, 3, 9), 2: (1, 2, 3, 9)}
    assert ids(waves.take(21)) == {1: (1, 2, 3, 9), 3: None}
    result = waves.result(3)
    assert result is not None
    assert len(result.token_ids) == 0
    first = [waves.ended(row, request, turn(30 + row, 40), clock=24) for row, request in wave.items() if request]
    assert (first, waves.out) == ([True, True], [0, 2])
    assert [waves.sampled[row] for row in (0, 1, 2)] == [2, 0, 2]
    assert conversations.played == []  # environments are told later
    waves.tell()
    assert [played.row for played in conversations.played] == [0, 2]
    again = waves.take(40)
    assert ids(again) == {0: (1, 2, 3, 9, 30, 40, 5, 6), 2: None}
    assert again[0] is not None
    assert not waves.ended(0, again[0], turn(8), clock=43)
    assert (waves.out, waves.sampled[0]) == ([0], 3)


def test_rows_wait_for_places_in_their_order() -> None:
    conversations = scripted()
    waves = TurnScheduler(conversations, Limits(tool_steps=16, places=2))
    assert waves.room == 2
    waves.begin([3, 2, 0, 1], clock=0)
    assert (waves.out, waves.more_wait, waves.room) == ([3, 2, 0, 1], True, -2)
    waves.tell()
    wave = waves.take(16)
    assert ids(wave) == {2: (1, 2, 3, 9), 3: None}  # row 3 is over at once, and row 0 begins
    assert (waves.out, waves.next_due, waves.room) == ([0, 1], 32, -1)
    assert wave[2] is not None
    waves.ended(2, wave[2], turn(4), clock=20)
    waves.tell()
    assert ids(waves.take(32)) == {0: (1, 2, 3, 9)}
    assert (waves.out, waves.more_wait) == ([2, 1], True)
    assert ids(waves.take(36)) == {2: None}
    assert (waves.out, waves.next_due, waves.more_wait, waves.room) == ([1], 52, False, 0)
    assert conversations.most_at_once == 2


WAVE = TypeAdapter(Wave)


class Answering(Hosts):
    """Two hosts, of which the other one's parts of exchanges are given."""

    def __init__(self, others: Sequence[Any]):
        super().__init__()
        self.members = (0, 1)
        self.sent: list[bytes] = []
        self._others = list(others)

    def gather(self, name: str, value: bytes, *, timeout_seconds: float | None = None) -> list[bytes]:
        del timeout_seconds
        assert name == "a wave of turns"
        self.sent.append(value)
        other = self._others.pop(0)
        return [value, other(value)]


def answer(mine: bytes, requests: Mapping[int, Any]) -> bytes:
    """The other host's part of a wave, with the digest of this one's."""
    return WAVE.dump_json((WAVE.validate_json(mine)[0], dict(requests)))


def begun(hosts: Hosts) -> TurnScheduler:
    """Of rows 0 and 1 this host has row 0."""
    waves = TurnScheduler(scripted(), Limits(tool_steps=1), host_of=lambda row: row, partners=hosts)
    waves.begin([0, 1], clock=0)
    waves.tell()
    return waves


def test_each_host_has_places_for_its_own_rows() -> None:
    """Rows 0 and 1 are this host's, with a place each; row 2 of the other one needs none, and row 3 waits for row 1."""
    founds: tuple[dict[int, Any], ...] = ({2: None}, {}, {})
    others = [lambda mine, found=found: WAVE.dump_json((WAVE.validate_json(mine)[0], found)) for found in founds]
    conversations, hosts = scripted(), Answering(others)
    conversations.unplaced = SCRIPTS[2]
    waves = TurnScheduler(conversations, Limits(tool_steps=1, places=1), host_of=lambda row: row // 2, partners=hosts)
    assert waves.room == 2
    waves.begin([0, 2, 1, 3], clock=0)
    assert waves.room == -1
    for clock, due in ((1, [0, 2]), (3, [0])):
        waves.tell()
        wave = waves.take(clock)
        assert (list(wave), waves.out, waves.next_due) == (due, [1, 3], None)
        assert wave[0] is not None
        waves.ended(0, wave[0], turn(4), clock=clock + 1)
    waves.tell()
    assert ids(waves.take(5)) == {0: None}
    assert (waves.out, waves.next_due, waves.room) == ([1, 3], 6, 0)


def test_hosts_tell_each_other_the_requests_of_their_rows() -> None:
    """A request goes without what its row has in common with what all hosts know of it."""
    parts = [lambda mine: answer(mine, {1: (0, ROWS[1])}), lambda mine: answer(mine, {1: None})]
    hosts = Answering(parts)
    waves = begun(hosts)
    wave = waves.take(1)
    assert ids(wave) == {0: (1, 2, 3, 9), 1: (1, 2, 3)}
    for row, request in wave.items():
        assert request is not None
        waves.ended(row, request, turn(30 + row, 40), clock=4)
    waves.tell()
    assert ids(waves.take(5)) == {0: (1, 2, 3, 9, 30, 40, 5, 6), 1: None}
    _, short = WAVE.validate_json(hosts.sent[1])
    assert short[0] == (6, replace(ROWS[0], token_ids=(5, 6), sampling=replace(ROWS[0].sampling, max_new_tokens=2)))
    assert waves.result(1) is None  # the other host has it


@pytest.mark.parametrize(
    "part",
    [
        lambda mine: WAVE.dump_json(("another digest", {1: (0, ROWS[1])})),
        lambda mine: answer(mine, {}),
        lambda mine: answer(mine, {2: (0, ROWS[2])}),
    ],
)
def test_hosts_that_speak_of_other_rows_are_found_out(part: Any) -> None:
    with pytest.raises(LockstepError, match=r"hosts 0, 1 must have the same turns .* at clock 1; set hosts.check=step"):
        begun(Answering([part])).take(1)


# --- in an engine -----------------------------------------------------------------------------------------------------


SMALL: dict[str, Any] = {"context_tokens": 128, "batch_paddings": (8,), "prefill_tokens": 64, "page_size": 1}
GROUP = 3


def asked(**sampling: Any) -> list[Request]:
    return requests(sampling=replace(SAMPLED, max_new_tokens=80, **sampling), group=GROUP)


def scripts(rows: Sequence[Request]) -> list[Script]:
    return [script(index, request.key.prompt) for index, request in enumerate(rows)]


def random_delays(seed: int, most: float = 0.03) -> Delay:
    rng = np.random.default_rng(seed)
    return lambda: float(rng.random() * most)


def converse(
    engine: Engine | Replicas,
    delay: Delay = at_once,
    plays: Sequence[Script] | None = None,
    places: int | None = None,
    finished: Finished | None = None,
    **sampling: Any,
) -> tuple[list[Completion], ScriptedConversations]:
    """Have the twelve conversations with engines that know no prefix."""
    rows = asked(**sampling)
    conversations = ScriptedConversations(rows, plays or scripts(rows), delay, places)
    engine.forget_prefixes()
    replicas = alone(engine) if isinstance(engine, Engine) else engine
    return replicas.generate(rows, finished, conversations=conversations), conversations


def bits(completions: Sequence[Completion]) -> list[tuple[list[int], bytes, list[bool]]]:
    return [
        (c.token_ids.tolist(), c.logprobs.tobytes(), c.sampled.tolist() if c.sampled is not None else [])
        for c in completions
    ]


@pytest.fixture(scope="module")
def plain(checkpoint: Path, model: nnx.Module) -> Engine:
    """An engine without prefix cache that decodes one step at a time."""
    return build_engine(checkpoint, model, prefix_cache=False, steps_per_launch=1, **SMALL)


@pytest.fixture(scope="module")
def told(plain: Engine) -> list[Completion]:
    """The conversations as that engine has them."""
    return converse(plain)[0]


def test_scripts_have_what_is_wanted_of_them() -> None:
    rows = scripts(asked())
    assert [len(rows[row].turns) for row in (1, 2, 3)] == [0, 1, 8]
    assert len(rows) == 12
    assert sum(len(row.turns) for row in rows) > 40


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_launch": 16},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"steps_per_launch": 1},
                {"steps_per_launch": 3, "page_size": 4},
                {"steps_per_launch": 16, "prefix_cache": False},
                {"steps_per_launch": 16, "tool_steps": 1},
                {"steps_per_launch": 16, "tool_steps": 100},
                {"steps_per_launch": 16, "max_running_requests": 2, "batch_paddings": None, "kv_tokens": 2000},
            )
        ),
    ],
    ids=str,
)
def test_turns_are_those_of_plain_requests(
    checkpoint: Path, model: nnx.Module, plain: Engine, told: list[Completion], options: dict[str, Any]
) -> None:
    """The prompt of the plain request is the whole conversation so far, and its engine keeps no prefix."""
    engine = build_engine(checkpoint, model, **(SMALL | options))
    found, conversations = converse(engine, random_delays(1))
    played = conversations.played
    assert len(played) == sum(len(row.turns) for row in scripts(asked()))
    plain.forget_prefixes()
    turns, expected = [one.completion for one in played], plain.generate([turn.request for turn in played])
    assert_alike(turns, expected)
    assert [one.finish_reason for one in turns] == [one.finish_reason for one in expected]
    assert_alike(found, told)
    assert_that_prefixes_are_kept(engine, played)


def assert_that_prefixes_are_kept(engine: Engine, played: Sequence[Played]) -> None:
    """What a turn has in common with the one before has whole pages in the cache, but for the last token sampled."""
    options, before, found = engine.options, dict[int, tuple[int, ...]](), []
    for turn in played:
        ids, past = turn.request.token_ids, before.get(turn.row, ())
        if past and ids[: len(past)] == past:
            found.append((turn.completion.cached_tokens, (len(past) - 1) // options.page_size * options.page_size))
        before[turn.row] = (*ids, *turn.completion.token_ids.tolist())
    assert len(found) > 30
    if options.prefix_cache:
        assert all(cached >= kept for cached, kept in found)
    else:
        assert not any(cached for cached, _ in found)


@pytest.mark.full
def test_no_delay_changes_a_bit_nor_a_decision(checkpoint: Path, model: nnx.Module) -> None:
    engine = build_engine(checkpoint, model, steps_per_launch=3, **SMALL)
    seen = []
    for delay in (at_once, random_delays(1), random_delays(2, most=0.1)):
        before = engine.use
        completions, conversations = converse(engine, delay)
        use = engine.use - before
        counted = use.steps, use.launches, use.prefills, use.turns, use.later_tokens, use.later_cached
        seen.append((bits(completions), conversations.asked, counted))
    assert seen[1:] == [seen[0], seen[0]]
    assert use.figures["rollout/environment_wait_seconds"] > 0.05
    assert use.figures["rollout/served_turns"] == sum(len(row.turns) for row in scripts(asked()))


def test_with_no_tool_steps_rows_return_as_soon_as_they_are_answered() -> None:
    slow = [1, 2]
    conversations = ScriptedConversations(ROWS, SCRIPTS)
    waves = TurnScheduler(conversations, Limits(tool_steps=0))
    with mock.patch.object(conversations, "ready", side_effect=lambda row: row not in slow):
        waves.begin([0, 1, 2, 3], clock=0)
        waves.tell()
        assert waves.next_due == 0
        assert list(waves.take(0)) == [0, 3]
        assert not waves.ready(5)
        slow.remove(2)
        time.sleep(0.02)  # rows are not asked all the time
        assert waves.ready(5)
        assert list(waves.take(5)) == [2]
        assert waves.out == [1]


@pytest.mark.full
@pytest.mark.parametrize("delays", [at_once, random_delays(3), random_delays(4, most=0.1)], ids=["0", "3", "4"])
def test_with_no_tool_steps_no_delay_changes_a_token(
    checkpoint: Path, model: nnx.Module, told: list[Completion], delays: Delay
) -> None:
    """Which rows decode together depends on time, and the tokens do not."""
    engine = build_engine(checkpoint, model, steps_per_launch=3, tool_steps=0, **SMALL)
    found, _ = converse(engine, delays)
    assert_alike(found, told)


@pytest.mark.full
def test_with_no_tool_steps_an_episode_may_end_once_another_has(
    checkpoint: Path, model: nnx.Module, told: list[Completion]
) -> None:
    """Row 2 has one turn, and is over only once row 3 has had its eight, as where a group is scored together."""
    engine = build_engine(checkpoint, model, steps_per_launch=16, tool_steps=0, **SMALL)
    conversations = ScriptedConversations(asked(), scripts(asked()))
    ready, rows = conversations.ready, conversations._rows

    def answered(row: int) -> bool:
        return ready(row) and (row != 2 or rows[2].turn == 0 or rows[3].state == "over")

    with mock.patch.object(conversations, "ready", side_effect=answered):
        found = alone(engine).generate(asked(), conversations=conversations)
    assert_alike(found, told)
    last = {row: place for place, row in enumerate(conversations.asked)}
    assert last[2] > last[3]


def test_a_group_prefills_its_first_prompt_once(checkpoint: Path, model: nnx.Module) -> None:
    """Eight rows of one prompt have their first turns in one wave; the others find the whole prompt but a token."""
    rows = requests(PROMPTS[1:2], replace(SAMPLED, max_new_tokens=80), group=8)
    conversations = ScriptedConversations(rows, scripts(rows), random_delays(3))
    engine = build_engine(checkpoint, model, steps_per_launch=16, **SMALL)
    alone(engine).generate(rows, conversations=conversations)
    first: dict[int, Played] = {}
    for turn in conversations.played:
        first.setdefault(turn.row, turn)
    assert conversations.asked[:8] == list(range(8))
    assert [first[row].completion.cached_tokens for row in sorted(first)] == [0, *[len(PROMPTS[1]) + 3] * 6]


@pytest.mark.full
@pytest.mark.parametrize("steps", [16, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 3))])
def test_rows_are_put_back_in_the_middle_of_a_conversation(
    checkpoint: Path, model: nnx.Module, plain: Engine, steps: int
) -> None:
    """The cache is so small that rows are put back and prefixes evicted, and the same ones at any delay.

    Turns of 20 to 25 tokens, or up to a stop token; where there are any the scheduler is bold about memory.
    """
    seen, plays = [], [script(row, row // GROUP, longest=3, tokens=(20, 26)) for row in range(12)]
    put_back, queue = list[int](), SteppedScheduler._extend_requests_to_queue

    def counted(self: SteppedScheduler, reqs: list[Any], is_retracted: bool = False) -> None:
        put_back.extend(len(req.origin_input_ids) for req in reqs if is_retracted)
        queue(self, reqs, is_retracted)

    told, _ = converse(plain, plays=plays, ignore_stop=False)
    bold = mock.patch.object(global_config, "default_init_new_token_ratio", 0.01)
    for delay in (at_once, random_delays(5)):
        sizes = {"kv_tokens": 140, "prefill_tokens": 16, "steps_per_launch": steps}
        with bold, mock.patch.object(SteppedScheduler, "_extend_requests_to_queue", counted):
            engine = build_engine(checkpoint, model, **(SMALL | sizes))
            found, conversations = converse(engine, delay, plays, ignore_stop=False)
        seen.append((bits(found), conversations.asked, engine.use.retracted, engine.digest))
    assert seen[0] == seen[1]
    assert len(put_back) == 2 * engine.use.retracted > 0
    assert max(put_back) > max(map(len, PROMPTS)) + 4  # it had a turn behind it
    assert_alike(found, told)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tensor", "places"),
    [(2, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (1, 8), (4, 8)))],
)
def test_replicas_have_the_same_conversations(
    checkpoint: Path, model: nnx.Module, told: list[Completion], tensor: int, places: int
) -> None:
    """With few places groups wait, so that replicas stop at agreed points while rows are out."""
    sizes = SMALL | {"max_running_requests": places, "batch_paddings": (places,), "kv_tokens": 160 * places}
    replicas, _ = build_replicas(checkpoint, model, tensor, engine_options(**sizes))
    seen, heard = [], dict[int, list[int]]()
    for delay in (at_once, random_delays(7, most=0.1)):
        found, _ = converse(replicas, delay, finished=lambda row, whole: heard.update({row: whole.token_ids.tolist()}))
        seen.append(bits(found))
        assert heard == dict(enumerate(tokens(found)))
    assert seen[0] == seen[1]
    assert tokens(found) == tokens(told)
    assert replicas.figures["rollout/environment_wait_seconds"] > 0


@pytest.mark.full
def test_with_no_tool_steps_replicas_wait_for_no_answer_at_agreed_points(
    checkpoint: Path, model: nnx.Module, told: list[Completion]
) -> None:
    """No row of one replica is answered before one of the other is over, though groups wait for a place."""
    sizes = SMALL | {"max_running_requests": 2, "batch_paddings": (2,), "kv_tokens": 320, "tool_steps": 0}
    replicas, _ = build_replicas(checkpoint, model, 2, engine_options(**sizes))
    conversations = ScriptedConversations(asked(), scripts(asked()))
    ready, rows = conversations.ready, conversations._rows
    with mock.patch.object(
        conversations,
        "ready",
        side_effect=lambda row: ready(row) and (row // GROUP % 2 == 0 or any(one.state == "over" for one in rows)),
    ):
        found = replicas.generate(asked(), conversations=conversations)
    assert tokens(found) == tokens(told)


@pytest.mark.full
@pytest.mark.parametrize("places", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_more_conversations_are_begun_at_once_than_have_places(
    checkpoint: Path, model: nnx.Module, told: list[Completion], places: int
) -> None:
    """Two are fewer than a group has, four are a part of the next one; the engine would run eight rows."""
    engine, seen = build_engine(checkpoint, model, steps_per_launch=3, **SMALL), []
    for delay in (at_once, random_delays(9)):
        found, conversations = converse(engine, delay, places=places)
        seen.append((bits(found), conversations.asked))
        assert conversations.most_at_once == places
    assert seen[0] == seen[1]
    assert [row[0] for row in seen[0][0]] == tokens(told)


@pytest.mark.full
def test_a_turn_that_no_engine_can_serve_is_refused(plain: Engine) -> None:
    rows = asked()[:1]
    conversations = ScriptedConversations(rows, [Script((5, 6), (3, 120), ((7,),))])
    with pytest.raises(RequestError, match="request 0: 16 prompt tokens and max_new_tokens=120 exceed .* 128"):
        alone(plain).generate(rows, conversations=conversations)
    plain.generate(rows)  # the engine has nothing left of it
