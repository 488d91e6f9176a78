"""Waves without an engine: when rows are due, and what hosts that drive one replica tell each other."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.engine.building import requests
from tests.engine.scripted import Script, ScriptedConversations
from tpu_grpo.engine import exchange
from tpu_grpo.engine.exchange import exchange_conversations
from tpu_grpo.engine.waves import Limits, Waves
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.episode import Branch, Episode, Turn
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.records.stages import Completion, Request

ROWS = requests(prompts=[(1, 2, 3)], group=4)
SCRIPTS = [Script((9,), (2, 2), ((5, 6),)), Script((9,), (2, 2), ((7,),)), Script((9,), (2,), ()), Script((9,), (), ())]


def turn(*tokens: int) -> Completion:
    return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "length", 0)


def scripted() -> ScriptedConversations:
    return ScriptedConversations(ROWS, SCRIPTS)


def ids(wave: dict[int, Request | None]) -> dict[int, tuple[int, ...] | None]:
    return {row: request and request.token_ids for row, request in wave.items()}


def test_rows_come_back_in_order_when_they_are_due() -> None:
    conversations = scripted()
    waves = Waves(conversations, Limits(tool_steps=16))
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
    assert [waves.sampled(row) for row in (0, 1, 2)] == [2, 0, 2]
    assert conversations.played == []  # environments are told later
    waves.tell()
    assert [played.row for played in conversations.played] == [0, 2]
    again = waves.take(40)
    assert ids(again) == {0: (1, 2, 3, 9, 30, 40, 5, 6), 2: None}
    assert again[0] is not None
    assert not waves.ended(0, again[0], turn(8), clock=43)
    waves.give_up()
    waves.tell()
    assert (waves.out, len(conversations.played), waves.sampled(0)) == ([], 2, 3)


def test_rows_wait_for_places_in_their_order() -> None:
    conversations = scripted()
    waves = Waves(conversations, Limits(tool_steps=16, places=2))
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


def begun(hosts: Hosts) -> Waves:
    """Of rows 0 and 1 this host has row 0."""
    waves = Waves(scripted(), Limits(tool_steps=1), host_of=lambda row: row, partners=hosts)
    waves.begin([0, 1], clock=0)
    waves.tell()
    return waves


def test_each_host_has_places_for_its_own_rows() -> None:
    """Rows 0 and 1 are this host's, with a place each; row 2 of the other one needs none, and row 3 waits for row 1."""
    others = [lambda mine, found=found: pickle.dumps((pickle.loads(mine)[0], found)) for found in ({2: None}, {}, {})]
    conversations, hosts = scripted(), Answering(others)
    conversations.unplaced = SCRIPTS[2]
    waves = Waves(conversations, Limits(tool_steps=1, places=1), host_of=lambda row: row // 2, partners=hosts)
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
    parts = [
        lambda mine: pickle.dumps((pickle.loads(mine)[0], {1: (0, ROWS[1])})),
        lambda mine: pickle.dumps((pickle.loads(mine)[0], {1: None})),
    ]
    hosts = Answering(parts)
    waves = begun(hosts)
    wave = waves.take(1)
    assert ids(wave) == {0: (1, 2, 3, 9), 1: (1, 2, 3)}
    for row, request in wave.items():
        assert request is not None
        waves.ended(row, request, turn(30 + row, 40), clock=4)
    waves.tell()
    assert ids(waves.take(5)) == {0: (1, 2, 3, 9, 30, 40, 5, 6), 1: None}
    _, short = pickle.loads(hosts.sent[1])
    assert (short[0][0], short[0][1].token_ids) == (6, (5, 6))
    assert waves.result(1) is None  # the other host has it


@pytest.mark.parametrize(
    "part",
    [
        lambda mine: pickle.dumps(("another digest", {1: (0, ROWS[1])})),
        lambda mine: pickle.dumps((pickle.loads(mine)[0], {})),
        lambda mine: pickle.dumps((pickle.loads(mine)[0], {2: (0, ROWS[2])})),
    ],
)
def test_hosts_that_speak_of_other_rows_are_found_out(part: Any) -> None:
    with pytest.raises(LockstepError, match=r"hosts 0, 1 must have the same turns .* at clock 1; set hosts.check=step"):
        begun(Answering([part])).take(1)


# --- whole conversations to all hosts --------------------------------------------------------------------------------


def whole(row: int) -> Completion:
    episode = Episode("p", (Branch((1,), 0, 2),), (Turn(0, 1, "a"),), "done", ({"role": "user"},), "game", reward=row)
    return Completion(np.array([row, 7], np.int32), np.zeros(2, np.float32), "stop", 0, episode=episode)


class Sharing(Hosts):
    """Three hosts, whose others send what they are given."""

    def __init__(self, others: Sequence[dict[int, Completion]]):
        super().__init__()
        self.count = 3
        self._others = [pickle.dumps(sorted(own.items())) for own in others]
        self.shapes: list[tuple[Any, ...]] = []

    def gather(self, name: str, value: bytes, *, timeout_seconds: float | None = None) -> list[bytes]:
        del name, timeout_seconds
        return [value, *(str(len(data)).encode() for data in self._others)]

    def gather_array(self, name: str, array: Any) -> Any:
        assert name == "conversations"
        start = len(self.shapes) * array.nbytes
        self.shapes.append((array.dtype, array.shape))
        others = [data[start : start + array.nbytes].ljust(array.nbytes, b"\0") for data in self._others]
        return np.stack([array, *(np.frombuffer(data, array.dtype) for data in others)])


@pytest.mark.parametrize(("fewest", "most", "pieces"), [(2**16, 2**26, 1), (64, 3 * 300, None)])
def test_every_host_gets_all_conversations(
    monkeypatch: pytest.MonkeyPatch, fewest: int, most: int, pieces: int | None
) -> None:
    """With pieces of at most 256 bytes a host there are several; host 2 has nothing."""
    monkeypatch.setattr(exchange, "FEWEST_BYTES", fewest)
    monkeypatch.setattr(exchange, "PIECE_BYTES", most)
    hosts = Sharing([{row: whole(row) for row in (1, 3, 4)}, {}])
    found = exchange_conversations({row: whole(row) for row in (0, 2)}, 5, hosts)
    assert [completion.token_ids.tolist() for completion in found] == [[row, 7] for row in range(5)]
    assert [completion.episode for completion in found] == [whole(row).episode for row in range(5)]
    assert len(set(hosts.shapes)) == 1
    if pieces:
        assert hosts.shapes == [(np.dtype(np.int32), (fewest // 4,))]
    else:
        assert hosts.shapes[0] == (np.dtype(np.int32), (256 // 4,))
        assert len(hosts.shapes) > 2
