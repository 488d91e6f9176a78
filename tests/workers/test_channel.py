"""Messages go between processes without anybody waiting."""

import pickle
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from tpu_grpo.workers.channel import BrokenChannelError, Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Connection]]:
    ours, theirs = socket.socketpair()
    channel, connection = Channel(ours, largest=2**20), Connection(theirs.detach())
    yield channel, connection
    channel.close()
    connection.close()


def test_messages_go_both_ways_in_order(ends: tuple[Channel, Connection]):
    channel, connection = ends
    channel.send({"a": 1})
    channel.send("b")
    assert [connection.recv(), connection.recv()] == [{"a": 1}, "b"]
    connection.send([1.5])
    connection.send(None)
    assert channel.receive() == [[1.5], None]
    assert channel.receive() == []


def test_what_does_not_fit_waits_and_goes_out_later(ends: tuple[Channel, Connection]):
    channel, connection = ends
    large = b"x" * 5_000_000
    channel.send(large)
    channel.send("after")
    assert channel.is_full
    received = b""
    while channel.is_full:
        received += _read(connection, 2**16)
        channel.flush()
    whole = 8 + len(pickle.dumps(large)) + len(pickle.dumps("after"))
    while len(received) < whole:
        received += _read(connection, 2**16)
    (length,) = struct.unpack("!i", received[:4])
    assert pickle.loads(received[4 : 4 + length]) == large
    assert pickle.loads(received[8 + length :]) == "after"


def _read(connection: Connection, most: int) -> bytes:
    with socket.socket(fileno=connection.fileno()) as end:
        data = end.recv(most)
        end.detach()
    return data


def test_a_message_that_is_not_whole_is_not_there_yet(ends: tuple[Channel, Connection]):
    channel, connection = ends
    data = pickle.dumps("text")
    with socket.socket(fileno=connection.fileno()) as end:
        end.send(struct.pack("!i", len(data)) + data[:3])
        assert channel.receive() == []
        assert channel.is_receiving
        end.send(data[3:])
        assert channel.receive() == ["text"]
        assert not channel.is_receiving
        end.detach()


RAISING = [b"cbuiltins\nint\n(]tR.", b"coperator\ngetitem\n(}S'a'\ntR.", b"cstruct\nunpack\n(S'!i'\nC\x01atR."]
"""Pickles that raise TypeError, KeyError and struct.error when they are read."""


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\xff" * 10,
        *(struct.pack("!i", n) + data for n, data in [(2**21, b""), *((len(r), r) for r in [b"abc", *RAISING])]),
    ],
)
def test_rubbish_breaks_a_channel(ends: tuple[Channel, Connection], rubbish: bytes):
    channel, connection = ends
    with socket.socket(fileno=connection.fileno()) as end:
        end.send(rubbish)
        end.detach()
    with pytest.raises(BrokenChannelError, match="wrote something of its own"):
        channel.receive()


def test_a_closed_end_is_told_behind_its_last_message():
    ours, theirs = socket.socketpair()
    channel, connection = Channel(ours, largest=2**20), Connection(theirs.detach())
    connection.send("last")
    connection.close()
    assert channel.receive() == ["last"]
    with pytest.raises(BrokenChannelError, match="closed its connection"):
        channel.receive()
    channel.send("nobody reads this")
    assert not channel.is_full
    channel.close()
