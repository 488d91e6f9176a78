"""What hosts bring each other: completions with their experts and whole conversations, bit for bit, in pieces."""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.building import requests
from tpu_grpo.engine import exchange
from tpu_grpo.engine.exchange import decode_completions, encode_completions, exchange_completions, share_bytes
from tpu_grpo.engine.experts import ExpertLayout
from tpu_grpo.hosts.host_agreement import read_told
from tpu_grpo.records.episode import Branch, Episode, Failure, KeptEnvironment, Turn
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.records.stages import Completion, routing_dtype


def exchanged(
    own: Sequence[dict[int, Completion]], room: int | None = None
) -> tuple[list[list[Completion]], list[int]]:
    """What every host gets, and the sizes of the pieces: threads that meet at every exchange are the hosts."""
    barrier, slots, pieces = threading.Barrier(len(own)), dict[int, Any](), list[int]()

    def run(host: int) -> list[Completion]:
        def gather(name: str, value: Any) -> list[Any]:
            slots[host] = name, value
            barrier.wait(timeout=30)
            assert len({slots[other][0] for other in slots}) == 1
            gathered = [slots[other][1] for other in range(len(own))]
            barrier.wait(timeout=30)
            return gathered

        def gather_array(name: str, array: np.ndarray) -> np.ndarray:
            pieces.extend([array.nbytes] if host == 0 else [])
            assert array.dtype == np.int32  # which no device pads
            return np.stack(gather(name, array))  # of one shape, or this raises

        def share(name: str, value: Any, kind: object) -> list[Any]:
            return [read_told(json.dumps(given).encode(), kind, name) for given in gather(name, value)]

        hosts: Any = SimpleNamespace(index=host, count=len(own), share=share, gather_array=gather_array)
        completions, senders = exchange_completions(own[host], sum(map(len, own)), hosts, room)
        assert all(index in own[sender] for index, sender in enumerate(senders))
        return completions

    with ThreadPoolExecutor(len(own)) as pool:
        return list(pool.map(run, range(len(own)))), pieces


def assert_equal(before: Completion, after: Completion) -> None:
    for name in ("token_ids", "logprobs", "experts", "kept", "sampled"):
        one, other = getattr(before, name), getattr(after, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert (other.dtype, other.shape, other.tobytes()) == (one.dtype, one.shape, one.tobytes())
    assert (after.finish_reason, after.cached_tokens) == (before.finish_reason, before.cached_tokens)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("experts", [None, 8, 300])
@pytest.mark.parametrize("piece_bytes", [1, 10**9])
def test_completions_and_experts_reach_every_host_in_pieces_of_one_size(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, experts: int | None, kept: bool
) -> None:
    """Host 1 sends 5 of 8 rows, one more than its even share; with small pieces both send several."""
    monkeypatch.setattr(exchange, "FEWEST_BYTES", 64)
    monkeypatch.setattr(exchange, "PIECE_BYTES", max(128, piece_bytes))
    rng = np.random.default_rng(0)
    layout = None if experts is None else ExpertLayout(layers=3, per_token=5, dtype=routing_dtype(experts))
    asked = [replace(r, token_ids=tuple(range(2, 3 + i))) for i, r in enumerate(requests(group=2))]
    lengths = rng.integers(1, 17, len(asked))
    made = [
        Completion(
            rng.integers(0, 2**31 - 1, n).astype(np.int32),
            -rng.random(n).astype(np.float32) * np.float32(1e-7),
            "length" if n == 5 else "stop",
            int(n) * 100,
            rng.integers(0, experts or 0, (len(r.token_ids) + n - 1, 3, 5)).astype(layout.dtype) if layout else None,
            np.arange(n, dtype=np.int32) + 7 if kept else None,
        )
        for r, n in zip(asked, lengths, strict=True)
    ]
    own = [{i: made[i] for i in (0, 2, 3)}, {i: made[i] for i in (1, 4, 5, 6, 7)}]
    room = share_bytes(asked, 2, 32, layout)
    assert room >= max(len(encode_completions(dict(enumerate(made[i : i + 4])))) for i in range(5))
    found, pieces = exchanged(own, room)
    for completions in found:
        for before, after in zip(made, completions, strict=True):
            assert_equal(before, after)
    assert len(set(pieces)) == 1
    assert (len(pieces) > 2) == (piece_bytes == 1)


def whole(row: int) -> Completion:
    episode = Episode("p", (Branch((1,), 0, 2),), (Turn(0, 1, "a"),), "done", ({"role": "user"},), "game", reward=row)
    return Completion(np.array([row, 7], np.int32), np.zeros(2, np.float32), "stop", 0, episode=episode)


@pytest.mark.parametrize(("fewest", "most", "pieces"), [(2**16, 2**26, 1), (64, 3 * 300, None)])
def test_every_host_gets_all_conversations(
    monkeypatch: pytest.MonkeyPatch, fewest: int, most: int, pieces: int | None
) -> None:
    """With pieces of at most 256 bytes a host there are several; host 2 has nothing."""
    monkeypatch.setattr(exchange, "FEWEST_BYTES", fewest)
    monkeypatch.setattr(exchange, "PIECE_BYTES", most)
    found, sizes = exchanged([{row: whole(row) for row in rows} for rows in ((0, 2), (1, 3, 4), ())])
    for completions in found:
        assert [completion.token_ids.tolist() for completion in completions] == [[row, 7] for row in range(5)]
        assert [completion.episode for completion in completions] == [whole(row).episode for row in range(5)]
    assert set(sizes) == {fewest if pieces else 256}
    assert len(sizes) == 1 if pieces else len(sizes) > 2


def test_a_conversation_survives_being_written() -> None:
    """Numbers keep their bits, also those that are none, or that need more than 64; hosts run nothing that they get."""
    branch = Branch((1, 2), 0, 2, np.arange(12, dtype=np.uint16).reshape(2, 3, 2))
    failure = Failure("died", "ended", reward=-0.1)
    kept = KeptEnvironment("game.py:Game", bytes(range(256)))
    said = ({"role": "assistant", "content": "\u00e9", "tool_calls": [{"arguments": {"n": 2**70, "x": None}}]},)
    turns = (Turn(0, 1, "a", ("move", ""), "b", 3, float("-inf"), 1), Turn(1, 2, "c"))
    longer = Branch((), 2, 2, np.zeros((5, 3, 2), np.uint16))  # experts of as many tokens as the branch has
    episode = Episode("p", (branch, longer), turns, "failed", said, "game", 0.1, failure, kept, 1e-300)
    logprobs = np.array([-0.1, np.nan], np.float32)
    given = Completion(
        np.array([5, 7], np.int32), logprobs, "length", 4, None, np.array([3, 4]), np.array([True, False]), episode
    )
    empty = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", 0)
    found = decode_completions(encode_completions({2**40: given, 3: empty}))
    assert list(found) == [2**40, 3]
    assert_equal(given, found[2**40])
    assert_equal(empty, found[3])
    there = found[2**40].episode
    assert there is not None
    for one, right in zip(there.branches, episode.branches, strict=True):
        np.testing.assert_array_equal(one.experts, right.experts)
    first, second = (replace(one, experts=None) for one in there.branches)
    expected = replace(episode, branches=tuple(replace(one, experts=None) for one in episode.branches))
    assert replace(there, branches=(first, second)) == expected
    with pytest.raises(AssertionError, match="completions hold records, arrays and JSON, got object"):
        encode_completions({0: replace(given, episode=replace(episode, messages=({"role": object()},)))})


# --- what no host sends ----------------------------------------------------------------------------------------------

FORGED: dict[str, Any] = {
    "no JSON": b"{",
    "no list": b"3",
    "deep": b"[" * 100_000,
    "an index that is text": ["x", {}],
    "a field that no record has": {"more": 1},
    "a field that lacks": {"token_ids": None},
    "another type of numbers": {"logprobs": ["<f8", [2], 0]},
    "objects": {"token_ids": ["|O", [1], 0]},
    "records": {"token_ids": ["i4,(", [2], 0]},
    "no type at all": {"sampled": ["import os", [2], 0]},
    "another shape": {"token_ids": ["<i4", [1, 2], 0]},
    "a shape beyond the bytes": {"token_ids": ["<i4", [10**9], 0]},
    "a shape beyond 64 bits": {"token_ids": ["<i4", [10**30], 0]},
    "a place beyond the bytes": {"token_ids": ["<i4", [2], 10**6]},
    "a place before them": {"token_ids": ["<i4", [2], -8]},
    "a place that is text": {"token_ids": ["<i4", [2], "x"]},
    "more numbers": {"logprobs": ["<f4", [3], 0]},
    "fewer kept": {"kept": ["<i4", [1], 0]},
    "another reason": {"finish_reason": "forged"},
    "a count that is text": {"cached_tokens": "many"},
    "a count below 0": {"cached_tokens": -1},
    "an episode that is text": {"episode": "x"},
    "a turn beyond the tokens": {"turns": [{"start": 0, "end": 3, "text": "a"}]},
    "a turn that runs back": {"turns": [{"start": 1, "end": 0, "text": "a"}]},
    "a branch beyond the tokens": {"branches": [{"prompt": [1], "start": 0, "end": 9, "experts": None}]},
    "a prompt of texts": {"branches": [{"prompt": ["a"], "start": 0, "end": 2, "experts": None}]},
    "another ending": {"ending": "forged"},
    "a reward that is text": {"reward": "much"},
    "attributes that are text": {"kept_environment": {"source": "a", "state": "!"}},
    "attributes that are not there": {"kept_environment": {"source": "a", "state": None}},
}


@pytest.mark.parametrize("what", FORGED)
def test_a_completion_that_no_host_sends_is_refused(what: str) -> None:
    """Each of these has one value that is not of its type, shape or size; the same without it is read."""
    data = encode_completions({1: whole(1)})
    end = 8 + int.from_bytes(data[:8], "little")
    [[row, sound]] = json.loads(data[8:end])
    forged = FORGED[what]
    if isinstance(forged, dict):
        part = sound["episode"] if sound["episode"].keys() & forged and what != "fewer kept" else sound
        if "kept_environment" in forged:
            part, forged = sound["episode"], {"kept": forged["kept_environment"]}
        part.update(forged)
        text = json.dumps([[row, sound]]).encode()
    else:
        text = forged if isinstance(forged, bytes) else json.dumps([forged]).encode()
    with pytest.raises(LockstepError, match="(?s)only the hosts of a run may write .* at 'the completions of host 2'"):
        decode_completions(len(text).to_bytes(8, "little") + text + data[end:], host=2)


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 8, b"\xff" * 100])
def test_bytes_that_are_no_completions_are_refused(data: bytes) -> None:
    with pytest.raises(LockstepError, match="at 'the completions of host 1'"):
        decode_completions(data, host=1)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (({1: whole(1)}, {1: whole(1)}), "completion 1 of 3, which is none of its own at 'the completions of host 2'"),
        (({3: whole(2)}, {1: whole(1)}), "completion 3 of 3, .* at 'the completions of host 1'"),
        (({-1: whole(2)}, {1: whole(1)}), "completion -1 of 3, .* at 'the completions of host 1'"),
    ],
)
def test_every_completion_comes_once(others: Sequence[dict[int, Completion]], message: str) -> None:
    with pytest.raises(LockstepError, match=message):
        exchanged([{0: whole(0)}, *others])


@pytest.mark.parametrize("size", [-4, "x", 1.5, 2**41])
def test_a_size_that_no_host_has_is_refused(size: Any) -> None:
    with pytest.raises(LockstepError, match="what no host tells"):
        read_told(json.dumps(size).encode(), exchange.SIZE, "sizes")
