"""The program that forks a service's workers, and ends each worker with all processes that the worker started.

    main process                        fork server                     a worker
    Job                         ->      sets up users' code, in mode "per_session"
                                <-      Ready or SetupFailed
    Fork(7), with a socket      ->      forks                     ->    serving.py
    Finish(7, 5.0)              ->      kills worker 7 if it lives after 5 s
                                <-      Exited(7, ...)

The server has one thread and runs no users' code after the set-up, so that forking is safe and the server always
answers. The server becomes the parent of processes that an ended worker has left behind, and kills them.
"""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import NoReturn

from tpu_grpo.workers import inside
from tpu_grpo.workers.channel import BrokenChannelError, MainChannel
from tpu_grpo.workers.messages import Exited, Finish, Fork, Job, Ready, Service
from tpu_grpo.workers.process import how_it_ended
from tpu_grpo.workers.serving import serve, set_up

_POLL_SECONDS = 1.0
_FULL_SECONDS = 0.02


@dataclass
class _Child:
    number: int
    leash: int
    """The child's descriptor of the lifeline. It stays open in the server, too, so that the child is killed with the
    main process even if it closes the descriptor."""
    deadline: float = float("inf")
    forced: bool = False


def main() -> None:
    """Run the server; its arguments are the descriptors of its socket and of the lifeline (`WorkerProcess`)."""
    channel, lifeline = MainChannel(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2])
    inside.end_with_parent(lifeline)
    inside.print_by_line()
    with contextlib.suppress(EOFError):  # the main process closed its end
        job: Job = channel.wait()
        inside.limit_memory(job.memory_bytes)
        if job.service.mode == "per_session" and not set_up(channel, job.service):
            return
        inside.adopt_orphans()
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called")  # by jax, whose threads are not started here
        _ForkServer(channel, lifeline, job.service).run()


class _ForkServer:
    def __init__(self, channel: MainChannel, lifeline: int, service: Service):
        self._channel, self._lifeline, self._service = channel, lifeline, service
        self._children: dict[int, _Child] = {}
        self._helpers = frozenset(inside.children())  # processes that the import has started
        self._files = inside.allow_many_files()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        inside.flush_output()  # otherwise each worker would print the buffered text, too
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # each conversation seeds it, and would have to import it
        gc.collect()
        gc.freeze()  # the memory that workers share with this process stays shared
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes)
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        inside.outlive_parent(self._lifeline)  # run() notices the parent's end, and first ends the workers
        try:
            self._channel.send(Ready())
            while self._channel.queued:
                self._do(self._channel.queued.popleft())
            while True:
                self._advance()
        except BrokenChannelError:  # the main process closed its end
            pass
        finally:
            self._kill_all()

    def _advance(self) -> None:
        """Handle messages, kill late workers, and reap those that have ended."""
        until = min([time.monotonic() + _POLL_SECONDS, *(child.deadline for child in self._children.values())])
        left = _FULL_SECONDS if self._channel.is_full else max(until - time.monotonic(), 0.0)
        for key, _ in self._selector.select(left):
            if key.fileobj is self._channel:
                for message in self._channel.receive():
                    self._do(message)
            else:
                os.read(self._woken, 2**16)
        now = time.monotonic()
        for pid, child in self._children.items():
            if child.deadline <= now:
                child.deadline, child.forced = float("inf"), True
                _kill_group(pid)
        self._reap()
        self._channel.flush()

    def _do(self, message: Fork | Finish) -> None:
        if isinstance(message, Fork):
            self._fork(message.number, self._channel.descriptors.popleft())
            return
        for child in self._children.values():
            if child.number == message.number:
                child.deadline = min(child.deadline, time.monotonic() + message.seconds)

    def _fork(self, number: int, descriptor: int) -> None:
        server, leash = os.getpid(), None
        try:
            leash = os.open(f"/proc/self/fd/{self._lifeline}", os.O_RDONLY | os.O_NONBLOCK)
            pid = os.fork()
        except OSError as error:
            for unused in (descriptor, *(() if leash is None else (leash,))):
                os.close(unused)
            self._channel.send(Exited(number, f"could not be started: {error.strerror}", forced=False))
            return
        if pid == 0:
            self._become_worker(descriptor, leash, server)
        os.close(descriptor)
        self._children[pid] = _Child(number, leash)

    def _become_worker(self, descriptor: int, leash: int, server: int) -> NoReturn:
        try:
            self._leave_server(leash, server)
            serve(MainChannel(socket.socket(fileno=descriptor)), self._service)
            inside.leave(0)
        finally:
            try:
                traceback.print_exc()
            finally:
                inside.leave(1)  # also after an error, the child must not run the server's loop

    def _leave_server(self, leash: int, server: int) -> None:
        os.setsid()
        inside.die_with(server)
        inside.adopt_orphans()
        inside.end_with_parent(leash)
        inside.start_afresh()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._channel.close()
        for unused in (self._woken, self._wakes, self._lifeline, *(c.leash for c in self._children.values())):
            os.close(unused)
        inside.allow_files(self._files)

    def _reap(self) -> None:
        """Reap the workers that have ended, and end the processes that they left behind."""
        has_reaped = False
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                child, has_reaped = self._children.pop(found.si_pid, None), True
                if child is not None:
                    _kill_group(found.si_pid)  # before reaping, which frees the id
                _, status = os.waitpid(found.si_pid, 0)
                if child is not None:
                    os.close(child.leash)
                    how = how_it_ended(os.waitstatus_to_exitcode(status))
                    self._channel.send(Exited(child.number, how, child.forced))
        if has_reaped:
            for pid in {*inside.children()} - self._helpers - {*self._children}:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)  # its own children become ours once it has ended

    def _kill_all(self) -> None:
        for pid in self._children:
            _kill_group(pid)
        with contextlib.suppress(ChildProcessError):
            while left := [*self._children, *({*inside.children()} - self._helpers)]:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                pid, _ = os.waitpid(-1, 0)
                self._children.pop(pid, None)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a process that is not the leader of a group yet is ended alone
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
