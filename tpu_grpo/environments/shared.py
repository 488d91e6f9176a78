"""Environments with async methods, of which a process has many on one event loop, as the main process sees them.

``loop_server.py`` is the program at the other end. A process that has had ``recycle`` conversations gets no more, and
ends with the last of its own.
"""

import socket
from pathlib import Path
from selectors import EVENT_READ, BaseSelector

from tpu_grpo.environments.actions import Answered, Ended, Failed, Reply
from tpu_grpo.environments.forked import LARGEST_REPLY, Listener
from tpu_grpo.environments.loop_server import PROGRAM
from tpu_grpo.environments.requests import Called, Job, Ready, Request, SetupFailed
from tpu_grpo.environments.server import SETTINGS
from tpu_grpo.environments.starting import Starting
from tpu_grpo.workers.channel import FOREIGN, BrokenChannelError, Channel
from tpu_grpo.workers.process import WorkerProcess

_TIDY_SECONDS = 5.0


class _Loop:
    """A process with an event loop."""

    def __init__(self, job: Job, directory: Path):
        ours, theirs = socket.socketpair()
        self.process = WorkerProcess(PROGRAM, theirs, directory, SETTINGS)
        self.channel = Channel(ours, LARGEST_REPLY)
        self.channel.send(job)
        self.is_ready = False
        self.conversations = 0
        self.numbers: set[int] = set()


class SharedEnvironments:
    """The processes of one async environment's conversations."""

    grace = 2.0
    """A process has these seconds beyond a deadline to say that an answer is late; its loop is blocked if not."""
    is_closing = False
    """Environments are closed when ``close`` waits for their processes."""

    def __init__(self, job: Job, directory: Path, count: int, recycle: int, selector: BaseSelector, listener: Listener):
        self._job, self._directory, self._recycle = job, directory, recycle
        self._selector, self._listener = selector, listener
        self._loops: list[_Loop] = []
        self._leaving: list[WorkerProcess] = []
        """Processes that are about to end."""
        self._loop_of: dict[int, _Loop] = {}
        self.starting = Starting(job.loaded.name)
        for _ in range(count):
            self._add_loop()

    @property
    def is_ready(self) -> bool:
        """Say whether a conversation can begin at once."""
        return any(loop.is_ready for loop in self._loops)

    @property
    def is_full(self) -> bool:
        """Say whether something waits to be sent."""
        return any(loop.channel.is_full for loop in self._loops)

    def flush(self) -> None:
        """Send what waits."""
        for loop in self._loops:
            loop.channel.flush()
        for process in [process for process in self._leaving if process.ended]:
            self._leaving.remove(process)
            process.kill()

    def begin(self, number: int) -> None:
        """Give a conversation to the process with the fewest; one must be ready."""
        ready = [loop for loop in self._loops if loop.is_ready]
        fresh = [loop for loop in ready if loop.conversations < self._recycle] or ready
        loop = min(fresh, key=lambda loop: len(loop.numbers))
        loop.numbers.add(number)
        loop.conversations += 1
        self._loop_of[number] = loop
        if loop.conversations == self._recycle:
            self._add_loop()

    def ask(self, number: int, request: Request, seconds: float) -> None:
        """Send a request of a conversation, which is cancelled after ``seconds``."""
        if (loop := self._loop_of.get(number)) is not None:
            loop.channel.send((number, request, seconds))

    def is_answering(self, number: int) -> bool:
        """Say whether a part of an answer has come, of this conversation or of another in its process."""
        return number in self._loop_of and self._loop_of[number].channel.is_receiving

    def release(self, number: int, seconds: float) -> None:
        """Let a conversation's environment be closed."""
        if (loop := self._loop_of.pop(number, None)) is None:
            return
        loop.numbers.discard(number)
        loop.channel.send((number, None, 0.0))
        if loop.conversations >= self._recycle and not loop.numbers:
            self._let_go(loop)

    def late(self, number: int) -> None:
        """End a process whose loop is blocked, as it neither answered nor said that it was late."""
        loop = self._loop_of.pop(number)
        loop.numbers.discard(number)
        self._end(loop)
        self._tell([*loop.numbers], "was ended with its process, where another environment had blocked the event loop")

    def close(self) -> None:
        """End all processes."""
        while self._loops:
            self._let_go(self._loops[-1])
        while self._leaving:
            process = self._leaving.pop()
            process.wait(_TIDY_SECONDS)
            process.kill()
        self._loop_of.clear()

    def _add_loop(self) -> None:
        loop = _Loop(self._job, self._directory)
        self._loops.append(loop)
        self._selector.register(loop.channel, EVENT_READ, lambda: self._hear(loop))

    def _let_go(self, loop: _Loop) -> None:
        """Let a process close its environments and end by itself."""
        self._loops.remove(loop)
        self._selector.unregister(loop.channel)
        loop.channel.close()
        if loop.is_ready:
            self._leaving.append(loop.process)
        else:
            loop.process.kill()

    def _end(self, loop: _Loop) -> str:
        """End a process, and see to it that there is another."""
        self._loops.remove(loop)
        self._selector.unregister(loop.channel)
        ending = loop.process.kill()
        loop.channel.close()
        if not loop.is_ready:
            self.starting.failed(ending)
        if loop.conversations < self._recycle:  # or its successor is there already
            self._add_loop()
        return ending

    def _tell(self, numbers: list[int], text: str) -> None:
        for number in numbers:
            del self._loop_of[number]
            self._listener.lost(number, text)

    def _hear(self, loop: _Loop) -> None:
        """Take in what a process says."""
        if loop not in self._loops:
            return
        try:
            for message in loop.channel.receive():
                match message:
                    case Ready():
                        loop.is_ready = True
                        self.starting.ready()
                    case SetupFailed(text, trace) if not loop.is_ready:
                        raise self.starting.refused(text, trace)
                    case (int(number), Called() | Answered() | Ended() | Failed() as said):
                        self._told(loop, number, said)
                    case _:
                        raise BrokenChannelError(FOREIGN)
        except BrokenChannelError:
            self._tell([*loop.numbers], f"lost its process, which {self._end(loop)}")

    def _told(self, loop: _Loop, number: int, said: Reply | Called) -> None:
        if number not in loop.numbers:
            return
        if isinstance(said, Called):
            self._listener.went_on(number)
        else:
            self._listener.answered(number, said)
