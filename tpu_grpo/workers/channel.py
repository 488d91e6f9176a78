"""Messages over a socket between the main process, which never blocks on the socket, and another process.

    channel = WorkerChannel(ours, (Ready, Answered), largest=2**20)     # in the main process
    channel.send(message)           # bytes that do not fit into the socket's buffer are sent by a later flush
    channel.receive()               # the messages that have arrived completely, in order

    channel = MainChannel(theirs)   # in a fork server or a worker
    message = channel.wait()        # waits for the next message
    channel.say(Ready())            # waits until the message is sent

A message is sent as its length (an unsigned 32-bit integer, big-endian), followed by its bytes. The main process sends
pickles, but unpickles nothing that it receives. A message to the main process is one line with a session's number and
the name of a dataclass, then the dataclass's fields as JSON, whose types are checked. The JSON may hold NaN and
integers beyond 64 bits. Arrays and bytes are base64 text, which the code that uses the field decodes; an unpaired
surrogate becomes a question mark.
"""

import base64
import collections
import contextlib
import errno
import json
import os
import pickle
import select
import socket
import struct
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

_LENGTH = struct.Struct("!I")
_READ_BYTES = 2**18
_adapter = cache(TypeAdapter)
FOREIGN = "wrote something of its own into its connection"
"""The error text for a process that has written something other than a message."""


class BrokenChannelError(Exception):
    """The other end is closed, or has sent an invalid message."""


class Channel:
    """One end of a socket between two processes."""

    def __init__(self, end: socket.socket, largest: int = 2**32 - 1):
        """Use the socket ``end``; a received message may have at most ``largest`` bytes."""
        end.setblocking(False)
        self._socket = end
        self._largest = largest
        self._leaving: collections.deque[tuple[memoryview, int | None]] = collections.deque()
        self._coming = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, which is readable when messages have arrived."""
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._leaving)

    @property
    def is_receiving(self) -> bool:
        """Whether a message has arrived only in part."""
        return bool(self._coming)

    def flush(self) -> None:
        """Send as many waiting bytes as the socket accepts; bytes for a closed end are dropped."""
        try:
            while self._leaving:
                data, descriptor = self._leaving[0]
                if descriptor is None:
                    sent = self._socket.send(data)
                else:
                    sent = socket.send_fds(self._socket, [data], [descriptor])
                    os.close(descriptor)
                if sent < len(data):
                    self._leaving[0] = data[sent:], None
                else:
                    self._leaving.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # temporary: too many descriptors are in transit
                self._drop()  # the other end is closed, which the next read reports

    def receive(self) -> list[Any]:
        """Return the messages that have arrived. Raises BrokenChannelError if there are none and the other end is
        closed, or if the other end has written something other than a message."""
        is_open, messages = self._read(), []
        while len(self._coming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._coming)
            if length > self._largest:
                raise BrokenChannelError(FOREIGN)
            if len(self._coming) < _LENGTH.size + length:
                break
            data = bytes(memoryview(self._coming)[_LENGTH.size : _LENGTH.size + length])
            del self._coming[: _LENGTH.size + length]
            messages.append(self._message(data))
        if not messages and not is_open:
            raise BrokenChannelError("closed its connection")
        return messages

    def close(self) -> None:
        """Close this end."""
        self._drop()
        self._socket.close()

    def _send(self, data: bytes, descriptor: int | None = None) -> None:
        self._leaving.append((memoryview(_LENGTH.pack(len(data)) + data), descriptor))
        self.flush()

    def _read(self) -> bool:
        """Read arrived bytes, up to the size of the largest message; return whether the other end is open."""
        try:
            while len(self._coming) < _LENGTH.size + self._largest:
                if not (data := self._received()):
                    return False
                self._coming += data
        except BlockingIOError:
            pass
        except ConnectionResetError:
            return False
        return True

    def _received(self) -> bytes:
        return self._socket.recv(_READ_BYTES)  # drops descriptors that are sent along

    @abstractmethod
    def _message(self, data: bytes) -> Any: ...

    def _drop(self) -> None:
        for _, descriptor in self._leaving:
            if descriptor is not None:
                os.close(descriptor)
        self._leaving.clear()


class WorkerChannel(Channel):
    """The main process's end of a socket, which receives pairs (session's number, record of one of ``types``)."""

    def __init__(self, end: socket.socket, types: tuple[type, ...], largest: int):
        super().__init__(end, largest)
        self._types = types

    def send(self, message: Any, descriptor: int | None = None) -> None:
        """Send as much of a message as the socket accepts; ``descriptor``, if given, is sent along and closed here."""
        self._send(pickle.dumps(message), descriptor)

    def _message(self, data: bytes) -> tuple[int, Any]:
        try:
            return decode(data, self._types)
        except ValueError as error:
            raise BrokenChannelError(FOREIGN) from error


class MainChannel(Channel):
    """The other end of a `WorkerChannel`, in a fork server or a worker."""

    def __init__(self, end: socket.socket):
        super().__init__(end)
        self.descriptors: collections.deque[int] = collections.deque()
        """The descriptors that arrived with messages, in order."""
        self.queued: collections.deque[Any] = collections.deque()
        """Messages that arrived together with the one that ``wait`` returned."""

    def wait(self) -> Any:
        """Wait for the next message and return it; raises EOFError if the main process has ended or closed its end."""
        while not self.queued:
            self._poll(select.POLLIN)
            try:
                self.queued.extend(self.receive())
            except BrokenChannelError as error:
                raise EOFError from error
        return self.queued.popleft()

    def say(self, record: Any, number: int = 0) -> None:
        """Send a record of a session, and wait until it is sent completely."""
        self.send(record, number)
        while self.is_full:
            self._poll(select.POLLOUT)
            self.flush()

    def send(self, record: Any, number: int = 0) -> None:
        """Send as much of a session's record as the socket accepts."""
        self._send(encode(number, record))

    def close(self) -> None:
        """Close this end, and the received descriptors that were not taken."""
        while self.descriptors:
            with contextlib.suppress(OSError):
                os.close(self.descriptors.popleft())
        super().close()

    def _poll(self, event: int) -> None:
        poll = select.poll()  # select.select() takes no descriptor above 1023
        poll.register(self._socket, event)
        poll.poll()

    def _received(self) -> bytes:
        data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 8)
        self.descriptors.extend(descriptors)
        return data

    def _message(self, data: bytes) -> Any:
        return pickle.loads(data)  # the main process wrote it


# --- messages to the main process -------------------------------------------------------------------------------------


def encode(number: int, record: Any) -> bytes:
    """Encode a record and its session's number as bytes."""
    fields = json.dumps(vars(record), ensure_ascii=False, default=_as_json)
    return f"{number} {type(record).__name__}\n{fields}".encode("utf-8", "replace")


def _as_json(value: Any) -> Any:
    if hasattr(value, "tobytes"):  # numpy's, which not every worker has imported
        return base64.b64encode(value.tobytes()).decode()
    if isinstance(value, bytes):
        return value.decode("ascii")
    if is_dataclass(value) or isinstance(value, Mapping):
        return dict(value if isinstance(value, Mapping) else vars(value))
    raise TypeError(f"{type(value).__name__} has no form in a message")


def decode(data: bytes, types: tuple[type, ...]) -> tuple[int, Any]:
    """Decode a message: the number of a session, and a record of one of ``types``. Raises ValueError for other data."""
    head, _, fields = data.partition(b"\n")
    number, name = head.decode("ascii").split(" ")
    of_name = [kind for kind in types if kind.__name__ == name]
    if not of_name:
        raise ValueError(f"a message must be one of {', '.join(kind.__name__ for kind in types)}, got {name!r}")
    return int(number), _adapter(of_name[0]).validate_json(fields, strict=True)
