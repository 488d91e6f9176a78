"""The program that has imported an environment's class, and forks a process for each conversation.

    main process                        fork server                     a conversation's process
    Job                         ->      imports the class
                                <-      Ready or SetupFailed
    Fork(7), with a socket      ->      forks                     ->    limits, session; then forked_process.py
    Finish(7, 5.0)              ->      kills it if it is late
                                <-      Exited(7, ...)

It is one thread and runs no users' code after the import, so that forking is safe and it always answers. It adopts
what a conversation's process leaves behind, and ends it.
"""

import contextlib
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tpu_grpo.environments.finding import find_environment, import_beforehand
from tpu_grpo.environments.forked_process import converse
from tpu_grpo.environments.playing import Played
from tpu_grpo.environments.requests import Exited, Finish, Fork, Job, Ready, SetupFailed
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers.inside import (
    adopt_orphans,
    children,
    die_with,
    end_with_parent,
    flush_output,
    leave,
    limit_memory,
    outlive_parent,
    print_by_line,
    start_afresh,
)
from tpu_grpo.workers.open_files import allow_files, allow_many_files
from tpu_grpo.workers.process import how_it_ended

PROGRAM = "from tpu_grpo.environments.fork_server import main; main()"
MOST_BYTES = 2**16
"""The longest message between the main process and the server."""
_POLL_SECONDS = 1.0


@dataclass
class _Child:
    number: int
    leash: int
    """Its end of the lifeline; it stays open here, so that the process cannot get rid of it."""
    deadline: float = float("inf")
    forced: bool = False


def main() -> None:
    """Serve on the socket whose descriptor is the first argument; the second is the lifeline's."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):  # the main process wants no more
        _serve()


def _serve() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    lifeline = int(sys.argv[2])
    end_with_parent(lifeline)
    print_by_line()
    job = _received_job(control)
    limit_memory(job.memory_bytes)
    try:
        target = find_environment(job.loaded.source)
        import_beforehand(target)
    except EpisodeError as error:
        trace = "".join(traceback.format_exception(error))
        control.send(pickle.dumps(SetupFailed(str(error)[: MOST_BYTES // 4], trace[-MOST_BYTES // 4 :])))
        return
    adopt_orphans()
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called")  # jax says so, whose threads are not started here
    _ForkServer(control, lifeline, job, target).serve()


def _received_job(control: socket.socket) -> Job:
    _, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, 1)
    if not descriptors:
        raise EOFError
    with open(descriptors[0], "rb") as file:
        file.seek(0)
        return pickle.load(file)


class _ForkServer:
    def __init__(self, control: socket.socket, lifeline: int, job: Job, target: Any):
        self._control, self._lifeline, self._played = control, lifeline, Played(job, target)
        self._children: dict[int, _Child] = {}
        self._helpers = frozenset(children())  # processes that the import has started
        self._files = allow_many_files()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        flush_output()  # each process would write the rest of a line once more
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # each process seeds it, and would import it by itself
        gc.collect()
        gc.freeze()  # the memory that children share with this process stays shared
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        outlive_parent(self._lifeline)  # it learns of it here, and first ends what conversations have started
        self._say(Ready())
        try:
            while self._advance():
                pass
        finally:
            self._kill_all()

    def _advance(self) -> bool:
        """Do what is asked, and see who has ended; return whether the main process is still there."""
        deadlines = [child.deadline for child in self._children.values()]
        left = min([time.monotonic() + _POLL_SECONDS, *deadlines]) - time.monotonic()
        for key, _ in self._selector.select(max(left, 0.0)):
            if key.fileobj is self._control and not self._hear():
                return False
            if key.fileobj == self._woken:
                os.read(self._woken, MOST_BYTES)
        now = time.monotonic()
        for pid, child in self._children.items():
            if child.deadline <= now:
                child.deadline, child.forced = float("inf"), True
                _kill_group(pid)
        self._reap()
        return True

    def _say(self, message: Any) -> None:
        self._control.send(pickle.dumps(message))

    def _hear(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, MOST_BYTES, 1)
        if not data:
            return False
        match pickle.loads(data):
            case Fork(number):
                self._fork(number, *descriptors)
            case Finish(number, seconds):
                for child in self._children.values():
                    if child.number == number:
                        child.deadline = min(child.deadline, time.monotonic() + seconds)
        return True

    def _fork(self, number: int, descriptor: int) -> None:
        server, leash = os.getpid(), None
        try:
            leash = os.open(f"/proc/self/fd/{self._lifeline}", os.O_RDONLY | os.O_NONBLOCK)
            pid = os.fork()
        except OSError as error:
            for unused in (descriptor, *(() if leash is None else (leash,))):
                os.close(unused)
            self._say(Exited(number, f"could not be started: {error.strerror}", forced=False))
            return
        if pid == 0:
            self._become(descriptor, leash, server)
        os.close(descriptor)
        self._children[pid] = _Child(number, leash)

    def _become(self, descriptor: int, leash: int, server: int) -> NoReturn:
        """Go on as the process of a conversation."""
        try:
            self._leave_server(leash, server)
            converse(Connection(descriptor), self._played)
            leave(0)
        finally:
            try:
                traceback.print_exc()
            finally:
                leave(1)  # whatever happened, nothing of it may go on in the server's own loop

    def _leave_server(self, leash: int, server: int) -> None:
        os.setsid()
        die_with(server)
        adopt_orphans()
        end_with_parent(leash)
        start_afresh()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._control.close()
        for unused in (self._woken, self._wakes, self._lifeline, *(c.leash for c in self._children.values())):
            os.close(unused)
        allow_files(self._files)

    def _reap(self) -> None:
        """Take in the processes that have ended, and end what they have left behind."""
        has_reaped = False
        while (ended := _ended_child()) is not None:
            has_reaped = True
            child = self._children.pop(ended, None)
            if child is not None:
                _kill_group(ended)  # before it is reaped, while the number is still its own
            _, status = os.waitpid(ended, 0)
            if child is not None:
                os.close(child.leash)
                self._say(Exited(child.number, how_it_ended(os.waitstatus_to_exitcode(status)), child.forced))
        if has_reaped:
            for pid in {*children()} - self._helpers - {*self._children}:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)  # it ends, and what it leaves behind is seen then

    def _kill_all(self) -> None:
        for pid in self._children:
            _kill_group(pid)
        with contextlib.suppress(ChildProcessError):
            while left := [*self._children, *({*children()} - self._helpers)]:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                pid, _ = os.waitpid(-1, 0)
                self._children.pop(pid, None)


def _ended_child() -> int | None:
    """Return the number of a child that has ended and is not reaped."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a process that is not the leader of a group yet is ended alone
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
