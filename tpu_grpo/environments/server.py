"""A fork server, as the main process sees it."""

import collections
import os
import pickle
import socket
from pathlib import Path
from typing import Any

from tpu_grpo.environments.fork_server import PROGRAM
from tpu_grpo.environments.requests import Job
from tpu_grpo.workers.channel import Channel
from tpu_grpo.workers.process import WorkerProcess

SETTINGS = {"PYTHONHASHSEED": "0"}
"""Sets of texts have the same order in every process, and so on every host and after a restart."""


class Server:
    """A fork server."""

    def __init__(self, job: Job, directory: Path):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = WorkerProcess(PROGRAM, theirs, directory, SETTINGS)
        self.control.setblocking(False)
        self.channels: dict[int, Channel] = {}
        self.dying: dict[int, str] = {}
        """Conversations whose connection is gone, with what is known of the reason."""
        self.alive: set[int] = set()
        """Conversations whose process has not ended, those that are over among them."""
        self.is_ready = False
        self.conversations = 0
        self._leaving: collections.deque[tuple[bytes, int | None]] = collections.deque()
        self.say("job", in_memory(pickle.dumps(job)))

    @property
    def is_full(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._leaving) or any(channel.is_full for channel in self.channels.values())

    def say(self, message: Any, descriptor: int | None = None) -> None:
        """Send a message, and a descriptor along with it, which is closed here."""
        self._leaving.append((pickle.dumps(message), descriptor))
        self.flush()

    def flush(self) -> None:
        """Send what waits."""
        try:
            while self._leaving:
                data, descriptor = self._leaving[0]
                socket.send_fds(self.control, [data], [] if descriptor is None else [descriptor])
                self._leaving.popleft()
                if descriptor is not None:
                    os.close(descriptor)
        except BlockingIOError:
            pass
        except OSError:  # it is gone, which whoever listens learns; or too many sockets are on their way to it
            pass
        for channel in self.channels.values():
            channel.flush()

    def close(self) -> None:
        """Close the connections, and what was to be sent."""
        for _, descriptor in self._leaving:
            if descriptor is not None:
                os.close(descriptor)
        self._leaving.clear()
        self.control.close()


def in_memory(data: bytes) -> int:
    """Return the descriptor of a file in memory with these bytes, for what is too long for a message."""
    descriptor = os.memfd_create("job")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor
