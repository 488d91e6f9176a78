"""Messages with a process that the main process never waits for.

    channel = Channel(ours)         # the other end has a multiprocessing.connection.Connection
    channel.send(message)           # what does not fit into the socket goes out with a later flush
    channel.flush()
    channel.receive()               # the messages that have come in whole, in order

A message is the length of its pickle as a signed 32-bit number, most significant byte first, and the pickle, as
``Connection`` writes them.
"""

import contextlib
import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!i")
_READ_BYTES = 2**18
FOREIGN = "wrote something of its own into its connection"
"""What is said of an end that has written what is no message."""


class BrokenChannelError(Exception):
    """The other end is gone, or has written what is no message."""


class Channel:
    """One end of a socket between two processes."""

    def __init__(self, end: socket.socket, largest: int):
        """Take a socket's end, for messages of up to ``largest`` bytes from the other end."""
        end.setblocking(False)
        self._socket = end
        self._largest = largest
        self._leaving = bytearray()
        self._coming = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, by which a selector knows when there is something to read."""
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """Say whether something still waits to go out."""
        return bool(self._leaving)

    @property
    def is_receiving(self) -> bool:
        """Say whether a part of a message has come in."""
        return bool(self._coming)

    def send(self, message: Any) -> None:
        """Send a message, as far as the socket takes it."""
        data = pickle.dumps(message)
        self._leaving += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send what waits to go out, as far as the socket takes it; what a closed end gets is dropped."""
        with contextlib.suppress(BlockingIOError):
            try:
                while self._leaving:
                    del self._leaving[: self._socket.send(self._leaving)]
            except (BrokenPipeError, ConnectionResetError):  # whoever reads here learns of it
                self._leaving.clear()

    def receive(self) -> list[Any]:
        """Return the messages that have come in.

        Raises:
            BrokenChannelError: if there are none, and the other end is closed or has written something else.
        """
        is_open = self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message[0])
        if not messages and not is_open:
            raise BrokenChannelError("closed its connection")
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self) -> bool:
        """Take in what is there; return whether the other end is open."""
        try:
            while data := self._socket.recv(_READ_BYTES):
                self._coming += data
        except BlockingIOError:
            return True
        except ConnectionResetError:
            pass
        return False

    def _next(self) -> tuple[Any] | None:
        """Take the first message off what has come in, if it is there whole."""
        if len(self._coming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._coming)
        if not 0 <= length <= self._largest:
            raise BrokenChannelError(FOREIGN)
        if len(self._coming) < _LENGTH.size + length:
            return None
        data = bytes(self._coming[_LENGTH.size : _LENGTH.size + length])
        del self._coming[: _LENGTH.size + length]
        try:
            return (pickle.loads(data),)
        except Exception as error:  # bytes that are no message: anything can come
            raise BrokenChannelError(FOREIGN) from error
