"""Starts the processes of users' code, sends them requests, enforces deadlines, and ends them.

    supervisor = Supervisor()
    group = supervisor.add(service, memory_bytes=2**30)     # a fork server, and the workers of one service
    group.call(session, request, seconds)                   # a session that has no worker gets one, see ``Session``
    supervisor.advance(0.1)                                 # reads messages, and enforces the deadlines
    group.release(session, 5.0)                             # the session is over
    supervisor.close(5.0)

A supervisor has no thread of its own: it reads messages and checks deadlines when its only user calls a method. A
reply that arrived in time is not late even if it is read late. Workers send JSON, never pickles. An invalid message
ends only the worker that sent it.
"""

import contextlib
import heapq
import itertools
import socket
import time
from functools import partial
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Any

from tpu_grpo.workers.channel import FOREIGN, BrokenChannelError, WorkerChannel
from tpu_grpo.workers.messages import Exited, Finish, Fork, Job, Ready, Service, SetupFailed, WentOn
from tpu_grpo.workers.process import WorkerProcess

_PROGRAM = "from tpu_grpo.workers.fork_server import main; main()"  # in a process of its own
START_SECONDS = 120.0
"""The limit for setting up users' code, counted from when a session begins to wait. No other limit runs meanwhile."""
FORK_SECONDS = 120.0
"""The limit for forking a session's worker, which may wait for earlier forks. Then the request's own limit starts."""
_MOST_FAILURES = 3
"""When this many processes in a row end before they are ready, the set-up is considered broken."""
_GRACE_SECONDS = 2.0
"""After a deadline, a shared worker has this time to report a late reply itself; otherwise its loop is blocked."""
_DYING_SECONDS = 1.0
"""A worker whose connection is gone has this time to end by itself, so that its exit code can be reported."""
_TIDY_SECONDS = 2.0
_LOOP_SECONDS = 5.0
_POLL_SECONDS = 0.5
_SERVER_BYTES = 2**26
_BLOCKED = "was ended with its process, where another environment had blocked the event loop"


class StartError(Exception):
    """Users' code cannot be set up in its process; the text says why, and what to do."""


class Session:
    """A conversation or a reward's batch that a worker runs; subclasses handle replies and late or lost workers."""

    number = 0
    worker: "Worker | None" = None
    """The session's worker; None before the session begins and after it is over."""
    is_asked = False
    seconds = asked_at = 0.0
    deadline = float("inf")

    def replied(self, reply: Any) -> None:
        """Handle the reply to the request; raises BrokenChannelError for a reply that does not fit the request."""
        raise NotImplementedError

    def went_on(self) -> bool:
        """Handle the start of the request's next part, with its own time limit; return whether it has a next part."""
        return False

    def late(self, *, has_begun: bool) -> None:
        """Handle that the worker was killed because its reply was late; if not ``has_begun``, its fork was late."""
        raise NotImplementedError

    def lost(self, how: str) -> None:
        """Handle that the worker has ended; ``how`` is phrased to follow a name, such as "exited with code 1"."""
        raise NotImplementedError


class Server:
    """A fork server, and the workers that it has forked."""

    def __init__(self, job: Job, directory: Path):
        ours, theirs = socket.socketpair()
        self.process = WorkerProcess(_PROGRAM, theirs, directory, job.service.secrets)
        self.channel = WorkerChannel(ours, (Ready, SetupFailed, Exited), _SERVER_BYTES)
        self.channel.send(job)
        self.workers: dict[int, Worker] = {}
        """The workers whose process has not ended, including those that are no longer used."""
        self.begun = 0
        self.is_ready = False


class Worker:
    """A process that was forked for sessions."""

    def __init__(self, number: int, group: "WorkerGroup", server: Server, channel: WorkerChannel):
        self.number, self.group, self.server, self.channel = number, group, server, channel
        self.sessions: dict[int, Session] = {}
        self.begun = 0.0
        """The sum of the ``weight`` of all sessions so far; a worker whose sum reaches ``recycle`` is replaced."""
        self.is_ready = False
        self.broke = ""
        """Why the worker's connection broke; empty if it works, or the main process closed it."""


class Starting:
    """The limits for starting a group's processes: how long a start may take, and how many processes in a row may end
    before they are ready."""

    def __init__(self, service: Service):
        self._service = service
        self.was_ready = False
        self._failures = 0
        self._waited_since: float | None = None

    def ready(self) -> None:
        """Record that users' code is set up in a process."""
        self.was_ready, self._failures, self._waited_since = True, 0, None

    def waited_for(self) -> None:
        """Record that a session waits while no process is ready; raises StartError if that has taken too long."""
        now = time.monotonic()
        if self._waited_since is None:
            self._waited_since = now
        if now > self._waited_since + START_SECONDS:
            self._waited_since = None
            raise StartError(
                f"{self._service.name} must be {self._service.start} in its process within {START_SECONDS:.0f} s, got "
                "no answer; see what its file does then"
            )

    def failed(self, how: str) -> StartError | None:
        """Record that a process ended before it was ready; return an error if another try is useless."""
        self._failures += 1
        self._waited_since = None  # the next process has its own time limit
        if not self.was_ready:
            return StartError(
                f"{self._service.name} must be {self._service.start} in its process, which {how} instead; import its "
                "file by hand to see why"
            )
        if self._failures >= _MOST_FAILURES:
            return StartError(
                f"{self._service.name} must be {self._service.start} in each of its processes, which it was at first, "
                f"got {self._failures} in a row that ended before, and the last {how}; see what its file needs then "
                "that is gone since: memory, files, a server"
            )
        return None

    def refused(self, text: str, trace: str) -> StartError:
        """Return the error for a process that reports why it could not set users' code up."""
        start = f"{self._service.name} could not be {self._service.start} in its process: {text}"
        return StartError(f"{start}\n{trace}".rstrip())


class Supervisor:
    """Starts processes of users' code, and exchanges messages with them; only one thread may call it."""

    def __init__(self) -> None:
        self.selector = DefaultSelector()
        self.groups: list[WorkerGroup] = []
        self.numbers = itertools.count(1)
        self._asked: dict[int, Session] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self.selector.register(self._woken, EVENT_READ, partial(self._woken.recv, 2**16))

    def wake(self) -> None:
        """Let the thread that waits in ``hear`` or ``advance`` go on; may be called on any thread."""
        with contextlib.suppress(OSError):  # it is full, and wakes the thread anyway; or closed
            self._waker.send(b"\0")

    def add(self, service: Service, memory_bytes: int, recycle: float = float("inf"), count: int = 0) -> "WorkerGroup":
        """Start a fork server for a service, without waiting for it; see ``WorkerGroup``."""
        self.groups.append(group := WorkerGroup(self, Job(service, memory_bytes), recycle, count))
        return group

    def expect(self, session: Session) -> None:
        """Start the time limit of a session's request or, if its worker is not ready, the limit for forking it."""
        assert session.worker is not None, "the session has no worker"
        session.is_asked, self._asked[session.number] = True, session
        grace = _GRACE_SECONDS if session.worker.group.service.mode == "shared" else 0.0
        session.asked_at = time.monotonic()
        session.deadline = session.asked_at + (session.seconds + grace if session.worker.is_ready else FORK_SECONDS)
        heapq.heappush(self._deadlines, (session.deadline, session.number))

    def settled(self, session: Session) -> None:
        """Record that a session waits for no reply any more."""
        session.is_asked = False
        self._asked.pop(session.number, None)

    def hear(self, seconds: float) -> bool:
        """Read the messages that arrive within ``seconds``, and return whether there were any. Raises StartError for
        users' code that cannot be set up in its process."""
        keys = self.selector.select(seconds)
        for key, _ in keys:
            key.data()
        for group in self.groups:
            if (problem := group.problem) is not None:
                group.problem = None
                raise problem
        return bool(keys)

    def advance(self, seconds: float) -> None:
        """Read the messages that arrive within ``seconds``, send waiting messages, and enforce deadlines.
        Raises the errors of ``hear``.

        Call ``hear(0.0)`` before, so that messages which arrived in time are read before deadlines are enforced.
        """
        if self._deadlines:
            seconds = min(seconds, max(self._deadlines[0][0] - time.monotonic(), 0.0))
        channels = [each.channel for group in self.groups for each in (*group.servers, *group.workers)]
        full = [channel for channel in channels if channel.is_full]
        for channel in full:
            self.selector.modify(channel, EVENT_READ | EVENT_WRITE, self.selector.get_key(channel).data)
        try:
            self.hear(seconds)
        finally:
            for channel in [channel for channel in full if channel.fileno() >= 0]:  # others are closed
                self.selector.modify(channel, EVENT_READ, self.selector.get_key(channel).data)
        for group in self.groups:
            group.flush()
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, number = heapq.heappop(self._deadlines)
            session = self._asked.get(number)
            if session is None or session.worker is None or session.deadline != deadline:
                continue
            if session.worker.channel.is_receiving and now < session.asked_at + 2 * session.seconds:
                session.deadline = now + _POLL_SECONDS  # a part of the reply has arrived
                heapq.heappush(self._deadlines, (session.deadline, number))
            else:
                session.worker.group.end_late(session)

    def close(self, seconds: float) -> None:
        """End all processes; idle workers have this many seconds to end by themselves."""
        for group in self.groups:
            group.count = 0
            for worker in [*group.workers]:
                is_busy = any(session.is_asked for session in worker.sessions.values())
                group.end(worker, seconds if worker.is_ready and not is_busy else 0.0)
        deadline = time.monotonic() + seconds
        while any(server.workers for group in self.groups for server in group.servers):
            if (left := deadline - time.monotonic()) <= 0:
                break
            with contextlib.suppress(StartError):  # a failed set-up no longer matters
                self.hear(min(left, _POLL_SECONDS))
            for group in self.groups:
                group.flush()
        for group in self.groups:
            group.close()
        self.groups.clear()
        self.selector.close()
        self._woken.close()
        self._waker.close()


class WorkerGroup:
    """The fork servers and workers of one service.

    In mode "per_session", a server that has forked ``recycle`` workers is replaced once the next server is ready, and
    ends with its last worker. In the other modes ``count`` workers serve all sessions. A caller may change ``count``;
    then ``fill`` starts missing workers. A worker of mode "shared" is replaced after ``recycle`` sessions.
    """

    def __init__(self, supervisor: Supervisor, job: Job, recycle: float, count: int):
        self.service = job.service
        self.recycle, self.count = recycle, count
        self.servers: list[Server] = []
        self.workers: list[Worker] = []
        """The workers whose connection is open."""
        self.ending: list[tuple[WorkerProcess, float]] = []
        """(server that is ending by itself, time at which it is killed if it has not ended)."""
        self.starting = Starting(job.service)
        self.problem: StartError | None = None
        """The error that `Supervisor.hear` raises once it has handled all messages that have arrived."""
        self._supervisor, self._job, self._directory = supervisor, job, Path.cwd()
        self._add_server()
        self.fill()

    @property
    def is_ready(self) -> bool:
        """Whether a session can begin without waiting."""
        if self.service.mode == "per_session":
            return any(server.is_ready for server in self.servers)
        return bool(self.free_workers)

    @property
    def free_workers(self) -> list[Worker]:
        """Return the workers that can take one more session: in mode "serial", those that have none."""
        is_serial = self.service.mode == "serial"
        return [worker for worker in self.workers if worker.is_ready and not (is_serial and worker.sessions)]

    def flush(self) -> None:
        """Send waiting messages, and kill servers that do not end in time."""
        for each in (*self.servers, *self.workers):
            each.channel.flush()
        for process, until in [*self.ending]:
            if process.ended or time.monotonic() >= until:
                self.ending.remove((process, until))
                process.kill()

    def fill(self) -> None:
        """Start the workers that are missing."""
        while sum(worker.begun < self.recycle for worker in self.workers) < self.count:
            self._add_worker()

    def call(self, session: Session, request: Any, seconds: float, weight: float = 1.0) -> None:
        """Send a request of a session to its worker, which has this many seconds to reply.

        A session without a worker begins: in mode "per_session" in a new worker, in other modes in the ready worker
        with the fewest sessions, so `is_ready` must be true. Then ``weight`` is added to ``Worker.begun``. Raises
        OSError if too many files are open.
        """
        if session.worker is None:
            worker = self._add_worker() if self.service.mode == "per_session" else self._chosen_worker()
            session.number, session.worker = next(self._supervisor.numbers), worker
            worker.sessions[session.number] = session
            worker.begun += weight
            self.fill()
        session.seconds = seconds
        self._supervisor.expect(session)
        session.worker.channel.send((session.number, request, seconds))

    def release(self, session: Session, seconds: float) -> None:
        """End a session; if it has a worker of its own, that worker is killed unless it ends within ``seconds``."""
        if (worker := session.worker) is None:
            return
        self._supervisor.settled(session)
        session.worker = None
        del worker.sessions[session.number]
        if self.service.mode == "per_session":
            self.end(worker, seconds)
        elif self.service.mode == "shared":
            worker.channel.send((session.number, None, 0.0))
            if worker.begun >= self.recycle and not worker.sessions:
                self.end(worker, _LOOP_SECONDS)

    def end(self, worker: Worker, seconds: float) -> None:
        """Let a worker end by itself; after ``seconds`` it is killed with all processes that it started."""
        if worker in self.workers:
            self._disconnect(worker)
            worker.server.channel.send(Finish(worker.number, seconds))

    def end_late(self, session: Session) -> None:
        """End the worker of a session whose reply is late."""
        worker = session.worker
        assert worker is not None, "the session has no worker"
        self.end(worker, 0.0)
        sessions = self._parted(worker)
        self.fill()
        for each in sessions:
            if each is session:
                session.late(has_begun=worker.is_ready)
            else:
                each.lost(_BLOCKED)

    def close(self) -> None:
        """End all processes."""
        while self.servers:
            self._let_go(self.servers.pop())
        for process, _ in self.ending:
            process.wait(_TIDY_SECONDS)
            process.kill()
        self.ending.clear()

    # --- starting and ending processes --------------------------------------------------------------------------------

    def _add_server(self) -> None:
        server = Server(self._job, self._directory)
        self.servers.append(server)
        self._supervisor.selector.register(server.channel, EVENT_READ, partial(self._hear_server, server))

    def _add_worker(self) -> Worker:
        if not self.servers:
            self._add_server()
        server = next((server for server in reversed(self.servers) if server.is_ready), self.servers[-1])
        if self.service.mode == "per_session" and server is self.servers[-1] and server.begun + 1 >= self.recycle:
            self._add_server()
        ours, theirs = socket.socketpair()
        types = (Ready, SetupFailed, WentOn, *self.service.replies)
        channel = WorkerChannel(ours, types, self.service.most_bytes)
        worker = Worker(next(self._supervisor.numbers), self, server, channel)
        self.workers.append(worker)
        server.workers[worker.number] = worker
        server.begun += 1
        self._supervisor.selector.register(channel, EVENT_READ, partial(self._hear, worker))
        server.channel.send(Fork(worker.number), theirs.detach())
        return worker

    def _chosen_worker(self) -> Worker:
        free = self.free_workers
        fresh = [worker for worker in free if worker.begun < self.recycle] or free
        return min(fresh, key=lambda worker: len(worker.sessions))

    def _disconnect(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            self._supervisor.selector.unregister(worker.channel)
            worker.channel.close()

    def _parted(self, worker: Worker) -> list[Session]:
        sessions = [*worker.sessions.values()]
        worker.sessions.clear()
        for session in sessions:
            self._supervisor.settled(session)
            session.worker = None
        return sessions

    def _retire(self) -> None:
        """End the servers that have been replaced and whose workers have all ended."""
        newest = max((i for i, server in enumerate(self.servers) if server.is_ready), default=0)
        for server in [server for server in self.servers[:newest] if not server.workers]:
            self.servers.remove(server)
            self._let_go(server)

    def _let_go(self, server: Server) -> None:
        """Disconnect a server, which then ends its workers and itself; kill a server that is not ready yet."""
        self._forget(server)
        if server.is_ready:
            self.ending.append((server.process, time.monotonic() + _TIDY_SECONDS))
        else:
            server.process.kill()

    def _forget(self, server: Server) -> None:
        for worker in server.workers.values():
            self._disconnect(worker)
        self._supervisor.selector.unregister(server.channel)
        server.channel.close()

    # --- messages from servers and workers ----------------------------------------------------------------------------

    def _hear(self, worker: Worker) -> None:
        if worker not in self.workers:
            return
        try:
            for number, record in worker.channel.receive():
                self._take(worker, number, record)
        except BrokenChannelError as error:
            worker.broke = str(error)
            self.end(worker, 0.0 if worker.broke == FOREIGN else _DYING_SECONDS)  # the server reports how it ended

    def _take(self, worker: Worker, number: int, record: Any) -> None:
        session = worker.sessions.get(number)
        match record:
            case Ready() if not worker.is_ready:
                worker.is_ready = True
                if self.service.mode != "per_session":
                    self.starting.ready()
                for each in worker.sessions.values():
                    if each.is_asked:  # otherwise it has replied before, with a message of its own making
                        self._supervisor.expect(each)
            case SetupFailed(text, trace) if not worker.is_ready and self.service.mode != "per_session":
                self.end(worker, _DYING_SECONDS)
                self.problem = self.starting.refused(text, trace)
            case Ready() | SetupFailed():
                raise BrokenChannelError(FOREIGN)
            case WentOn():
                if session is not None and session.is_asked and session.went_on():
                    self._supervisor.expect(session)
            case reply:
                if session is not None and session.is_asked:
                    self._supervisor.settled(session)
                    session.replied(reply)

    def _hear_server(self, server: Server) -> None:
        if server not in self.servers:
            return
        try:
            for _, message in server.channel.receive():
                match message:
                    case Ready():
                        server.is_ready = True
                        if self.service.mode == "per_session":
                            self.starting.ready()
                        self._retire()
                    case SetupFailed(text, trace):
                        self.problem = self.starting.refused(text, trace)
                    case Exited(number, text, forced) if number in server.workers:
                        self._lost(server.workers.pop(number), text, forced=forced)
                if server not in self.servers:  # it had been replaced, and its last worker is gone
                    return
        except BrokenChannelError:
            self._lost_server(server)

    def _lost(self, worker: Worker, how: str, *, forced: bool) -> None:
        """Handle the end of a worker; ``forced`` says that its fork server killed it."""
        self._hear(worker)  # it may have replied before
        is_wanted = bool(worker.broke) or worker in self.workers
        self._disconnect(worker)
        self._retire()
        if worker.broke == FOREIGN or (forced and worker.broke):
            how = f"{worker.broke}, and was ended"
        for session in self._parted(worker):
            session.lost(how)
        if is_wanted and not worker.is_ready and self.service.mode != "per_session":
            self.problem = self.problem or self.starting.failed(how)
        if self.problem is None:
            self.fill()

    def _lost_server(self, server: Server) -> None:
        self.servers.remove(server)
        self._forget(server)
        if server.is_ready:
            server.process.wait(_TIDY_SECONDS)  # for it to end its workers
        how = server.process.kill()
        if not server.is_ready:
            self.problem = self.problem or self.starting.failed(how)
        if self.problem is None and not self.servers:
            self._add_server()
        for worker in server.workers.values():
            for session in self._parted(worker):
                session.lost(f"lost the process that had forked it, which {how}")
        if self.problem is None:
            self.fill()
