"""The loop of a worker, which sets up users' code (unless its fork server did) and answers requests.

An example with session 7:

main process                            worker
                                <-      Ready or SetupFailed
(7, request, seconds)           ->      a session begins, or goes on
                                <-      7 WentOn, between the parts of a request
                                <-      7 the reply
(7, None, 0.0)                  ->      ends a session of a shared worker; other workers end with their connection
"""

import asyncio
import contextlib
import os
import traceback
from typing import Any

from tpu_grpo.records.errors import TpuGrpoError
from tpu_grpo.workers.channel import BrokenChannelError, MainChannel
from tpu_grpo.workers.inside import allow_many_files, leave
from tpu_grpo.workers.messages import Ready, Service, SetupFailed, WentOn

_TIDY_SECONDS = 5.0


def set_up(channel: MainChannel, service: Service) -> bool:
    """Set up users' code, and return whether that succeeded; a failure is reported to the main process."""
    try:
        service.set_up()
    except (Exception, SystemExit) as error:  # user code can raise anything
        text = str(error) if isinstance(error, TpuGrpoError) else f"{type(error).__name__}: {error}"
        channel.say(SetupFailed(text, "".join(traceback.format_exception(error))))
        return False
    return True


def serve(channel: MainChannel, service: Service) -> None:
    """Run a worker in its process, until the main process ends it."""
    if service.mode != "per_session" and not set_up(channel, service):
        return
    if service.mode == "shared":
        allow_many_files()
        channel.say(Ready())
        asyncio.run(_Loop(channel, service).serve())
    else:
        _serve_serially(channel, service)


def _serve_serially(channel: MainChannel, service: Service) -> None:
    process, number = os.getpid(), 0

    def say(record: Any) -> None:
        if os.getpid() != process:
            os._exit(0)  # users' code forked, and this child returned here, too
        channel.say(record, number)

    with service.answering(lambda: say(WentOn())) as answer, contextlib.suppress(EOFError, OSError):
        say(Ready())
        while True:
            number, request, seconds = channel.wait()
            say(answer(request, seconds))


class _Loop:
    """The sessions of a shared worker. A request that is not done in time is cancelled and reported as late. The main
    process ends the worker if its loop is blocked."""

    def __init__(self, channel: MainChannel, service: Any):
        self._channel, self._service = channel, service
        self._sessions: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._began: dict[int, float] = {}
        """Session -> time, by the loop's clock, at which the current part of its request began."""
        self._closing: set[asyncio.Task[Any]] = set()
        self._over = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._hear)
        await self._over.wait()
        loop.remove_reader(self._channel.fileno())
        for number in list(self._sessions):
            self._drop(number)
        if self._closing:
            await asyncio.wait(self._closing, timeout=_TIDY_SECONDS)
        leave(0)  # without waiting for tasks that refuse to be cancelled

    def _hear(self) -> None:
        try:
            messages = self._channel.receive()
        except BrokenChannelError:
            self._over.set()  # the main process is gone, or closed its end
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
        if (session := self._sessions.pop(number, None)) is not None:
            closing = asyncio.create_task(session.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Task[Any]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            traceback.print_exception(error)

    async def _answer(self, number: int, request: Any, seconds: float) -> None:
        if (session := self._sessions.get(number)) is None:
            session = self._sessions[number] = self._service.session(lambda: self._go_on(number))
        clock = asyncio.get_running_loop().time
        self._began[number] = clock()
        task = asyncio.ensure_future(session.reply(request))
        try:
            while not task.done() and (left := self._began[number] + seconds - clock()) > 0:
                await asyncio.wait([task], timeout=left)
        finally:
            is_late = not task.done()
            task.cancel()  # not awaited: it may ignore the cancellation
        self._say(number, session.late(request, seconds) if is_late else task.result())

    def _go_on(self, number: int) -> None:
        self._began[number] = asyncio.get_running_loop().time()
        self._say(number, WentOn())

    def _say(self, number: int, record: Any) -> None:
        self._channel.send(record, number)
        if self._channel.is_full:
            asyncio.get_running_loop().add_writer(self._channel.fileno(), self._flush)

    def _flush(self) -> None:
        self._channel.flush()
        if not self._channel.is_full:
            asyncio.get_running_loop().remove_writer(self._channel.fileno())
