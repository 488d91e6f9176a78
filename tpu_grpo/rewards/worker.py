"""The main program of a worker process: takes batches, answers them, until it is told to stop or its parent is gone."""

import contextlib
import fcntl
import os
import resource
import sys
import traceback
from multiprocessing.connection import Connection

from tpu_grpo.errors import RewardError
from tpu_grpo.rewards.answers import Answer, Batch
from tpu_grpo.rewards.calling import Caller
from tpu_grpo.rewards.finding import find
from tpu_grpo.rewards.processes import Job, Ready, Unready


def main() -> None:
    """Serve on the connection whose descriptor is the first argument; the second is the lifeline's."""
    connection = Connection(int(sys.argv[1]))
    _end_with_parent(int(sys.argv[2]))
    job: Job = connection.recv()
    resource.setrlimit(resource.RLIMIT_DATA, (job.memory_bytes, job.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    caller = _set_up(job, connection)
    if caller is not None:
        with contextlib.suppress(EOFError, OSError):  # the parent is gone, and so is the reason to be here
            _serve(caller, connection)
        caller.close()


def _set_up(job: Job, connection: Connection) -> Caller | None:
    try:
        caller = Caller(job.call, find(job.call.source))
    except RewardError as error:
        connection.send(Unready(str(error), ""))
    except (Exception, SystemExit) as error:  # user code: anything can come
        connection.send(Unready(f"{type(error).__name__}: {error}", traceback.format_exc()))
    else:
        connection.send(Ready())
        return caller
    return None


def _serve(caller: Caller, connection: Connection) -> None:
    process = os.getpid()
    while (task := connection.recv()) is not None:
        batch, seconds = task
        answer = _answer(caller, batch, seconds)
        if os.getpid() != process:
            os._exit(0)  # the reward forked and both returned; the child has nothing to say
        connection.send(answer)


def _answer(caller: Caller, batch: Batch, seconds: float) -> Answer:
    return caller.answer(batch, max(0.0, seconds - min(0.5, 0.1 * seconds)))  # before the parent loses patience


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel send SIGIO, which ends a process, to the whole group once the pipe's other end closes.

    A thread could not do it: code that hangs without giving up the interpreter lock would keep it from running.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
