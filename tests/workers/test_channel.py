"""Messages go between processes without the main process waiting, and what comes to it is only ever data."""

import math
import os
import pickle
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.workers.channel import BrokenChannelError, MainChannel, WorkerChannel, encode
from tpu_grpo.workers.messages import Ready

Ends = tuple[WorkerChannel, MainChannel, socket.socket]
"""The main process's end, the worker's, and the worker's without a form."""


@dataclass(frozen=True)
class Inner:
    name: str


@dataclass(frozen=True)
class Note:
    text: str
    number: int = 0
    value: float | None = None
    data: bytes = b""
    inner: tuple[Inner, ...] = ()
    by_name: Mapping[str, str] | None = None


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    raw = theirs.dup()
    main, worker = WorkerChannel(ours, (Ready, Note), largest=2**20), MainChannel(theirs)
    yield main, worker, raw
    for end in (main, worker, raw):
        end.close()


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


def test_messages_go_both_ways_in_order(ends: Ends):
    main, worker, _ = ends
    main.send({"a": 1})
    main.send("b")
    assert [worker.wait(), worker.wait()] == [{"a": 1}, "b"]
    worker.say(Note("c"), number=7)
    worker.say(Ready())
    assert main.receive() == [(7, Note("c")), (0, Ready())]
    assert main.receive() == []


@pytest.mark.parametrize(
    "note",
    [
        Note("é\n", 2**100, 0.1 + 0.2, b"base64==", (Inner("a"), Inner("b")), {"role": "tool"}),
        Note("", -(2**64), 1e308),
    ],
)
def test_records_arrive_as_they_were(ends: Ends, note: Note):
    main, worker, _ = ends
    worker.say(note)
    assert main.receive() == [(0, note)]


def test_what_has_no_form_of_its_own_has_one(ends: Ends):
    main, worker, _ = ends
    worker.say(Note("half \ud800 of a pair", value=math.nan))
    ((_, note),) = main.receive()
    assert (note.text, math.isnan(note.value)) == ("half ? of a pair", True)


def test_what_does_not_fit_waits_and_goes_out_later(ends: Ends):
    main, worker, _ = ends
    large = b"x" * 5_000_000
    main.send(large)
    main.send("after")
    assert main.is_full
    received = []
    while main.is_full or len(received) < 2:
        received += worker.receive()
        main.flush()
    assert received == [large, "after"]


def test_descriptors_come_along_with_their_messages(ends: Ends, tmp_path: Path):
    main, worker, _ = ends
    for name in "ab":
        (tmp_path / name).write_text(name)
        main.send(name, os.open(tmp_path / name, os.O_RDONLY))
    for name in "ab":
        assert worker.wait() == name
        with open(worker.descriptors.popleft()) as file:
            assert file.read() == name


def test_a_message_that_is_not_whole_is_not_there_yet(ends: Ends):
    main, _, raw = ends
    data = framed(encode(1, Note("text")))
    raw.send(data[:7])
    assert main.receive() == []
    assert main.is_receiving
    raw.send(data[7:])
    assert main.receive() == [(1, Note("text"))]
    assert not main.is_receiving


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


RUBBISH = {
    "no length": b"\xff" * 10,
    "too long": struct.pack("!I", 2**20 + 1),
    "no head": framed(b"abc"),
    "no number": framed(b'x Note\n{"text": ""}'),
    "a number of many digits": framed(b"9" * 10_000 + b' Note\n{"text": ""}'),
    "no such record": framed(b'1 Inner\n{"name": ""}'),
    "no JSON": framed(b"1 Note\n{"),
    "nested JSON": framed(b"1 Note\n" + b"[" * 100_000),
    "a field that is missing": framed(b"1 Note\n{}"),
    "another type": framed(b'1 Note\n{"text": 1}'),
    "another type inside": framed(b'1 Note\n{"text": "", "inner": [{"name": [1]}]}'),
    "an integer of many digits": framed(b'1 Note\n{"text": "", "number": %s}' % (b"9" * 10_000)),
    "no Unicode": framed(b'1 Note\n{"text": "\xff"}'),
}


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_breaks_a_channel(ends: Ends, rubbish: bytes):
    main, _, raw = ends
    raw.send(rubbish)
    with pytest.raises(BrokenChannelError, match="wrote something of its own"):
        main.receive()


@pytest.mark.parametrize("head", [b"", b"1 Note\n"])
def test_a_pickle_is_not_opened(ends: Ends, tmp_path: Path, head: bytes):
    main, _, raw = ends
    touches = pickle.dumps(Touches(tmp_path / "touched"))
    raw.send(framed(head + touches))
    with pytest.raises(BrokenChannelError, match="wrote something of its own"):
        main.receive()
    assert not (tmp_path / "touched").exists()
    pickle.loads(touches)
    assert (tmp_path / "touched").exists()  # as it would have done


def test_a_worker_that_writes_on_and_on_does_not_keep_the_main_process(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    main, _, raw = ends
    written = 0
    read = main._received

    def refilled() -> bytes:
        nonlocal written
        written += raw.send(b"\0" * 60_000)
        assert written < 2**22
        return read()

    monkeypatch.setattr(main, "_received", refilled)
    with pytest.raises(BrokenChannelError, match="wrote something of its own"):
        main.receive()


def test_a_closed_end_is_told_behind_its_last_message():
    ours, theirs = socket.socketpair()
    main, worker = WorkerChannel(ours, (Note,), largest=2**20), MainChannel(theirs)
    worker.say(Note("last"))
    worker.close()
    assert main.receive() == [(0, Note("last"))]
    with pytest.raises(BrokenChannelError, match="closed its connection"):
        main.receive()
    main.send("nobody reads this")
    assert not main.is_full
    main.close()
