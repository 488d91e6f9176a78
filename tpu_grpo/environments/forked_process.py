"""The process of one conversation, which a fork server has forked: it answers the main process until the end.

    main process                        this process
                                <-      Began
    Start(...)                  ->      the environment is made
                                <-      Answered(...)
    Act(...)                    ->      its tools are called, with Called between two of them
                                <-      Answered(...)
    End()                       ->
                                <-      Ended(...)

It ends when it has said Ended or Failed, or when nobody wants an answer any more.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from tpu_grpo.environments.actions import Ended, Failed, Reply
from tpu_grpo.environments.playing import Played, Playing
from tpu_grpo.environments.requests import Began, Called, Job, Request
from tpu_grpo.environments.values import WrongError
from tpu_grpo.records.episode import Failure

_Run = Callable[[Coroutine[Any, Any, Any]], Any]


def converse(connection: Connection, played: Played) -> None:
    """Play an environment as the other end of a connection asks, until its end; closes the environment."""
    with _runner(played.job) as run:
        _play(connection, played, run)


@contextmanager
def _runner(job: Job) -> Iterator[_Run]:
    """Give what waits for coroutines: an event loop, if the environment needs one."""
    if not job.loaded.awaits:
        yield _now
        return
    with asyncio.Runner() as runner:
        yield runner.run


def _play(connection: Connection, played: Played, run: _Run) -> None:
    process = os.getpid()

    def say(message: Reply | Began | Called) -> None:
        if os.getpid() != process:
            os._exit(0)  # the environment forked and both returned; the child has nothing to say
        connection.send(message)

    playing = Playing(played, lambda: say(Called()))
    with suppress(EOFError, OSError):  # nobody wants an answer any more
        say(Began())
        while True:
            reply = _reply(playing, connection.recv(), run)
            say(reply)
            if isinstance(reply, Ended | Failed):
                break
    run(playing.close())


def _reply(playing: Playing, request: Request, run: _Run) -> Reply:
    try:
        return run(playing.reply(request))
    except WrongError as error:
        return Failed(Failure("wrong", str(error)))


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns that waits for nothing, as those of a class without async methods.

    Raises:
        WrongError: for one that waits.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise WrongError("must declare methods whose results have to be awaited with async def, got one without; add it")
