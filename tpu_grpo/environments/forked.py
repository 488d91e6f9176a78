"""Environments that have a process of their own for their whole conversation, as the main process sees them.

``fork_server.py`` is the program at the other end. A server that has had ``recycle`` conversations is replaced once the
next is ready, and ends with the last of its own.
"""

import pickle
import resource
import socket
import time
from pathlib import Path
from selectors import EVENT_READ, BaseSelector
from typing import Any, Protocol

from tpu_grpo.environments.actions import Reply
from tpu_grpo.environments.fork_server import MOST_BYTES
from tpu_grpo.environments.requests import Began, Called, Exited, Finish, Fork, Job, Ready, Request, SetupFailed
from tpu_grpo.environments.server import Server
from tpu_grpo.environments.starting import Starting
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.channel import FOREIGN, BrokenChannelError, Channel
from tpu_grpo.workers.process import WorkerProcess

LARGEST_REPLY = 2**26
"""A reply has texts of at most 1 MiB for each of at most 16 calls, or what is kept, which is limited, too."""
_DYING_SECONDS = 1.0
_TIDY_SECONDS = 2.0


class Listener(Protocol):
    """Who is told what becomes of conversations."""

    def began(self, number: int) -> None:
        """Take note that a conversation has its process, and that its time runs."""
        ...

    def went_on(self, number: int) -> None:
        """Take note that a conversation's environment begins with the next call of its turn."""
        ...

    def answered(self, number: int, reply: Reply) -> None:
        """Take the answer of a conversation's environment."""
        ...

    def lost(self, number: int, text: str) -> None:
        """Take note that a conversation's process is gone; ``text`` says how."""
        ...


class ForkedEnvironments:
    """The processes of one environment's conversations."""

    grace = 0.0
    """A late answer is given no time beyond its deadline."""

    def __init__(self, job: Job, directory: Path, recycle: int, selector: BaseSelector, listener: Listener):
        self._job, self._directory, self._recycle = job, directory, recycle
        self._selector, self._listener = selector, listener
        self._servers: list[Server] = []
        self._server_of: dict[int, Server] = {}
        self._ending: list[tuple[WorkerProcess, float]] = []
        """Servers that end by themselves, and when each is ended if it has not."""
        self.starting = Starting(job.loaded.name)
        self._add_server()

    @property
    def is_ready(self) -> bool:
        """Say whether a conversation can begin at once."""
        return any(server.is_ready for server in self._servers)

    @property
    def is_full(self) -> bool:
        """Say whether something waits to be sent."""
        return any(server.is_full for server in self._servers)

    def flush(self) -> None:
        """Send what waits."""
        for server in self._servers:
            server.flush()
        for process, until in [*self._ending]:
            if process.ended or time.monotonic() >= until:
                self._ending.remove((process, until))
                process.kill()

    def begin(self, number: int) -> None:
        """Have a process for a conversation; one server must be ready."""
        server = [server for server in self._servers if server.is_ready][-1]
        ours, theirs = _socket_pair(len(self._server_of))
        channel = Channel(ours, LARGEST_REPLY)
        server.channels[number] = channel
        server.conversations += 1
        server.alive.add(number)
        self._server_of[number] = server
        self._selector.register(channel, EVENT_READ, lambda: self._hear(server, number))
        server.say(Fork(number), theirs.detach())
        if server.conversations >= self._recycle and server is self._servers[-1]:
            self._add_server()

    def ask(self, number: int, request: Request, seconds: float) -> None:
        """Send a request of a conversation, whose deadline the caller keeps."""
        if (channel := self._server_of[number].channels.get(number)) is not None:
            channel.send(request)

    def is_answering(self, number: int) -> bool:
        """Say whether a part of an answer has come."""
        channel = self._server_of[number].channels.get(number)
        return channel is not None and channel.is_receiving

    def release(self, number: int, seconds: float) -> None:
        """Let a conversation's process end; it is ended with all it started if it takes longer than ``seconds``."""
        server = self._server_of.pop(number, None)
        if server is None:
            return
        self._close(server, number)
        server.dying.pop(number, None)
        server.say(Finish(number, seconds))

    def late(self, number: int) -> None:
        """End a conversation's process, which did not answer in time."""
        self.release(number, 0.0)

    @property
    def is_closing(self) -> bool:
        """Say whether processes of conversations are still there."""
        return any(server.alive for server in self._servers)

    def close(self) -> None:
        """End all processes."""
        while self._servers:
            self._let_go(self._servers.pop())
        for process, _ in self._ending:
            process.wait(_TIDY_SECONDS)
            process.kill()
        self._ending.clear()
        self._server_of.clear()

    def _add_server(self) -> None:
        server = Server(self._job, self._directory)
        self._servers.append(server)
        self._selector.register(server.control, EVENT_READ, lambda: self._hear_server(server))

    def _retire(self) -> None:
        """Let the servers end that have been replaced, once the last of their conversations' processes has ended."""
        newest = max((i for i, server in enumerate(self._servers) if server.is_ready), default=0)
        for server in [server for server in self._servers[:newest] if not server.alive]:
            self._servers.remove(server)
            self._let_go(server)

    def _let_go(self, server: Server) -> None:
        """Let a server end its conversations' processes, and itself, without waiting for it."""
        self._forget(server)
        if server.is_ready:
            self._ending.append((server.process, time.monotonic() + _TIDY_SECONDS))
        else:
            server.process.kill()

    def _forget(self, server: Server) -> None:
        for number in [*server.channels]:
            self._close(server, number)
        self._selector.unregister(server.control)
        server.close()

    def _close(self, server: Server, number: int) -> None:
        if (channel := server.channels.pop(number, None)) is not None:
            self._selector.unregister(channel)
            channel.close()

    def _hear(self, server: Server, number: int) -> None:
        """Take in what a conversation's process says."""
        if number not in server.channels:
            return
        try:
            for message in server.channels[number].receive():
                if isinstance(message, Began):
                    self._listener.began(number)
                elif isinstance(message, Called):
                    self._listener.went_on(number)
                elif isinstance(message, Reply):
                    self._listener.answered(number, message)
                else:
                    raise BrokenChannelError(FOREIGN)
        except BrokenChannelError as error:
            self._close(server, number)
            server.dying[number] = str(error)
            server.say(Finish(number, _DYING_SECONDS))  # how it ended is told then

    def _hear_server(self, server: Server) -> None:
        """Take in what a server says."""
        if server not in self._servers:
            return
        try:
            while data := server.control.recv(MOST_BYTES):
                self._told(server, pickle.loads(data))
                if server not in self._servers:  # it had been replaced, and its last conversation is over
                    return
        except BlockingIOError:
            return
        except ConnectionResetError:
            pass
        self._lost_server(server)

    def _told(self, server: Server, message: Any) -> None:
        match message:
            case Ready():
                server.is_ready = True
                self.starting.ready()
                self._retire()
            case SetupFailed(text, trace):
                raise self.starting.refused(text, trace)
            case Exited(number, text, forced):
                self._hear(server, number)  # it may have answered before
                if (known := server.dying.pop(number, None)) is None:
                    known = "ended its connection"
                if self._server_of.get(number) is server:
                    self._close(server, number)
                    del self._server_of[number]
                    self._listener.lost(number, f"{known}, and was ended" if forced else text)
                server.alive.discard(number)
                self._retire()

    def _lost_server(self, server: Server) -> None:
        """Go on without a server that has ended."""
        self._servers.remove(server)
        numbers = [number for number, of in self._server_of.items() if of is server]
        self._forget(server)
        if server.is_ready:
            server.process.wait(_TIDY_SECONDS)  # it ends its conversations' processes
        ending = server.process.kill()
        if not server.is_ready:
            self.starting.failed(ending)
        for number in numbers:
            del self._server_of[number]
            self._listener.lost(number, f"lost the process that had forked it, which {ending}")
        if not self._servers:
            self._add_server()


def _socket_pair(conversations: int) -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise EpisodeError(
            f"each conversation with an environment needs an open file, and {conversations} have theirs, got "
            f"{error.strerror}; raise the limit (ulimit -n, at most {hard} here), or set environment.workers"
        ) from error
