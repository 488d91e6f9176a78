"""The program that has many conversations of an async environment, on one event loop.

    main process                        this process
    Job                         ->      imports the class
                                <-      Ready or SetupFailed
    (7, Start(...), seconds)    ->      a new environment; reset is awaited
                                <-      (7, Answered(...))
    (7, None, 0)                ->      closes it

What is not done in ``seconds`` is cancelled, and late. The main process ends the whole process if the loop is blocked.
"""

import asyncio
import contextlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from socket import socket
from typing import Any

from tpu_grpo.environments.actions import Failed, Reply
from tpu_grpo.environments.finding import find_environment
from tpu_grpo.environments.playing import Played, Playing
from tpu_grpo.environments.requests import Called, Job, Ready, Request, SetupFailed, late
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.channel import BrokenChannelError, Channel
from tpu_grpo.workers.inside import end_with_parent, leave, limit_memory, print_by_line
from tpu_grpo.workers.open_files import allow_many_files

PROGRAM = "from tpu_grpo.environments.loop_server import main; main()"
_LARGEST = 2**30
_TIDY_SECONDS = 5.0


def main() -> None:
    """Serve on the socket whose descriptor is the first argument; the second is the lifeline's."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):  # the main process wants no more
        _serve()


def _serve() -> None:
    end_with_parent(int(sys.argv[2]))
    print_by_line()
    end = socket(fileno=int(sys.argv[1]))
    connection = Connection(os.dup(end.fileno()))
    job: Job = connection.recv()
    limit_memory(job.memory_bytes)
    try:
        target = find_environment(job.loaded.source)
    except EpisodeError as error:
        connection.send(SetupFailed(str(error), "".join(traceback.format_exception(error))))
        return
    allow_many_files()
    connection.send(Ready())
    asyncio.run(_LoopServer(job, target, end).serve())


class _LoopServer:
    def __init__(self, job: Job, target: Any, end: socket):
        self._played = Played(job, target)
        self._channel = Channel(end, _LARGEST)
        self._playing: dict[int, Playing] = {}
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._began: dict[int, float] = {}
        """When what a conversation is asked began, by the loop's clock."""
        self._closing: set[asyncio.Task[Any]] = set()
        self._over = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._hear)
        await self._over.wait()
        loop.remove_reader(self._channel.fileno())
        for number in list(self._playing):
            self._drop(number)
        if self._closing:
            await asyncio.wait(self._closing, timeout=_TIDY_SECONDS)
        leave(0)  # without waiting for tasks that refuse to be cancelled

    def _hear(self) -> None:
        try:
            messages = self._channel.receive()
        except BrokenChannelError:
            self._over.set()  # the main process is gone, or wants no more
            return
        for number, request, seconds in messages:
            if request is None:
                self._drop(number)
            else:
                self._tasks[number] = asyncio.create_task(self._answer(number, request, seconds))

    def _drop(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()
        self._began.pop(number, None)
        if (playing := self._playing.pop(number, None)) is not None:
            closing = asyncio.create_task(playing.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Task[Any]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            traceback.print_exception(error)

    async def _answer(self, number: int, request: Request, seconds: float) -> None:
        if (playing := self._playing.get(number)) is None:
            playing = self._playing[number] = Playing(self._played, lambda: self._go_on(number))
        clock = asyncio.get_running_loop().time
        self._began[number] = clock()
        task = asyncio.ensure_future(playing.reply(request))
        try:
            while not task.done() and (left := self._began[number] + seconds - clock()) > 0:
                await asyncio.wait([task], timeout=left)
        finally:
            is_late = not task.done()
            task.cancel()  # and is not waited for: it may resist
        failed = Failed(late(request, self._played.job.loaded.takes, seconds, playing.made))
        self._say(number, failed if is_late else _result(task))

    def _go_on(self, number: int) -> None:
        """Give the next call of a turn its own time."""
        self._began[number] = asyncio.get_running_loop().time()
        self._say(number, Called())

    def _say(self, number: int, reply: Reply | Called) -> None:
        self._channel.send((number, reply))
        if self._channel.is_full:
            asyncio.get_running_loop().add_writer(self._channel.fileno(), self._flush)

    def _flush(self) -> None:
        self._channel.flush()
        if not self._channel.is_full:
            asyncio.get_running_loop().remove_writer(self._channel.fileno())


def _result(task: asyncio.Future[Reply]) -> Reply:
    if task.cancelled():
        return Failed(Failure("raised", "raised CancelledError"))
    return task.result()
