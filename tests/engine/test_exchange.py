"""What hosts bring each other: completions packed into arrays, experts in pieces, and whole conversations."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.engine.building import requests
from tpu_grpo.engine import exchange
from tpu_grpo.engine.exchange import (
    Exchange,
    decode_completions,
    encode_completions,
    exchange_conversations,
    pack,
    unpack,
)
from tpu_grpo.engine.experts import ExpertLayout
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.episode import Branch, Episode, Failure, KeptEnvironment, Turn
from tpu_grpo.records.stages import Completion, Request, routing_dtype


def test_completions_survive_being_packed() -> None:
    rng = np.random.default_rng(0)
    given = [
        Completion(
            rng.integers(0, 2**31 - 1, length).astype(np.int32),
            -rng.random(length).astype(np.float32) * np.float32(1e-7),
            "length" if length == 5 else "stop",
            cached_tokens=length * 100,
        )
        for length in (1, 5, 3)
    ]
    table = pack(given, rows=4, new_tokens=5)
    assert (table.shape, table.dtype) == ((4, 3 + 2 * 5), np.int32)
    found = unpack(table[:3])
    for before, after in zip(given, found, strict=True):
        np.testing.assert_array_equal(after.token_ids, before.token_ids)
        assert after.logprobs.tobytes() == before.logprobs.tobytes()
        assert (after.finish_reason, after.cached_tokens) == (before.finish_reason, before.cached_tokens)
        assert after.kept is None

    counted = [replace(c, kept=np.arange(len(c.token_ids), dtype=np.int32) + 7) for c in given]
    table = pack(counted, rows=4, new_tokens=5, kept=True)
    assert table.shape == (4, 3 + 3 * 5)
    for before, after in zip(counted, unpack(table[:3], kept=True), strict=True):
        np.testing.assert_array_equal(after.token_ids, before.token_ids)
        assert after.logprobs.tobytes() == before.logprobs.tobytes()
        np.testing.assert_array_equal(after.kept, before.kept)


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [8, 300])
@pytest.mark.parametrize("piece_bytes", [1, 10**9])
def test_experts_reach_every_host(experts: int, piece_bytes: int) -> None:
    """Replica 0 and 2 are host 0's, and replica 1 is host 1's, which sends 5 of 8 rows: in pieces of 4, and of one."""
    rng = np.random.default_rng(0)
    layout = ExpertLayout(layers=3, per_token=5, dtype=routing_dtype(experts))
    asked = [replace(r, token_ids=tuple(range(2, 3 + i)), return_experts=True) for i, r in enumerate(requests(group=2))]
    lengths = rng.integers(1, 17, len(asked))
    made = [
        Completion(
            rng.integers(0, 99, n).astype(np.int32),
            np.zeros(n, np.float32),
            "stop",
            0,
            rng.integers(0, experts, (len(r.token_ids) + n - 1, 3, 5)).astype(layout.dtype),
        )
        for r, n in zip(asked, lengths, strict=True)
    ]
    assigned, senders = [[0, 3], [1, 4, 5, 6, 7], [2]], [0, 1, 0]
    own = [{i: made[i] for i in (0, 2, 3)}, {i: made[i] for i in assigned[1]}]
    found = _exchanged(asked, assigned, senders, own, layout, piece_bytes)
    for completions in found:
        for before, after in zip(made, completions, strict=True):
            np.testing.assert_array_equal(before.token_ids, after.token_ids)
            np.testing.assert_array_equal(before.experts, after.experts)
            assert after.experts is not None
            assert after.experts.dtype == layout.dtype


def _exchanged(
    asked: Sequence[Request],
    assigned: Sequence[Sequence[int]],
    senders: Sequence[int],
    own: Sequence[dict[int, Completion]],
    layout: ExpertLayout,
    piece_bytes: int,
) -> list[list[Completion]]:
    """Both hosts' exchanges, on two threads that meet at every ``gather_array``."""
    barrier, slots, shapes = threading.Barrier(2), {}, set()

    def gather(host: int) -> Any:
        def gather_array(name: str, array: np.ndarray) -> np.ndarray:
            slots[host] = name, array
            shapes.add((name, array.shape))
            barrier.wait(timeout=30)
            assert slots[0][0] == slots[1][0]
            gathered = np.stack([slots[0][1], slots[1][1]])  # of one shape, or this raises
            barrier.wait(timeout=30)
            return gathered

        return gather_array

    def run(host: int) -> list[Completion]:
        hosts: Any = SimpleNamespace(index=host, count=2, gather_array=gather(host))
        exchange = Exchange(asked, assigned, senders, hosts)
        return exchange.with_experts(exchange.completions(own[host]), own[host], layout, context_tokens=32)

    with mock.patch("tpu_grpo.engine.exchange.PIECE_BYTES", piece_bytes), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert len(shapes) == 2  # one for completions and one for experts, whatever hosts send
    return found


# --- whole conversations to all hosts --------------------------------------------------------------------------------


def whole(row: int) -> Completion:
    episode = Episode("p", (Branch((1,), 0, 2),), (Turn(0, 1, "a"),), "done", ({"role": "user"},), "game", reward=row)
    return Completion(np.array([row, 7], np.int32), np.zeros(2, np.float32), "stop", 0, episode=episode)


class Sharing(Hosts):
    """Three hosts, whose others send what they are given."""

    def __init__(self, others: Sequence[dict[int, Completion]]):
        super().__init__()
        self.count = 3
        self._others = [encode_completions(own) for own in others]
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


def test_a_conversation_survives_being_written() -> None:
    """Numbers keep their bits, also those that are none, or that need more than 64; hosts run nothing that they get."""
    branch = Branch((1, 2), 0, 2, np.arange(12, dtype=np.uint16).reshape(2, 3, 2))
    failure = Failure("died", "ended", reward=-0.1)
    kept = KeptEnvironment("game.py:Game", bytes(range(256)))
    said = ({"role": "assistant", "content": "\u00e9", "tool_calls": [{"arguments": {"n": 2**70, "x": None}}]},)
    turns = (Turn(0, 1, "a", ("move", ""), "b", 3, float("-inf"), 1), Turn(1, 2, "c"))
    episode = Episode("p", (branch, Branch((), 2, 2)), turns, "failed", said, "game", 0.1, failure, kept, 1e-300)
    logprobs = np.array([-0.1, np.nan], np.float32)
    given = Completion(
        np.array([5, 7], np.int32), logprobs, "length", 4, None, np.array([3, 4]), np.array([True, False]), episode
    )
    [(row, found)] = decode_completions(encode_completions({2**40: given})).items()
    assert row == 2**40
    for name in ("token_ids", "logprobs", "kept", "sampled"):
        before, after = getattr(given, name), getattr(found, name)
        assert (after.dtype, after.tobytes()) == (before.dtype, before.tobytes())
    assert found.episode is not None
    np.testing.assert_array_equal(found.episode.branches[0].experts, branch.experts)
    first, second = (replace(one, experts=None) for one in found.episode.branches)
    expected = replace(episode, branches=(replace(branch, experts=None), episode.branches[1]))
    assert replace(found.episode, branches=(first, second)) == expected
    assert (found.finish_reason, found.cached_tokens, found.experts) == ("length", 4, None)
    with pytest.raises(AssertionError, match="conversations hold records, arrays and JSON, got object"):
        encode_completions({0: replace(given, episode=replace(episode, messages=({"role": object()},)))})
