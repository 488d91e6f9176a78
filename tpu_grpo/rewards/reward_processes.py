"""Runs a reward in worker processes, which are started when the first rows are scored."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import override

from tpu_grpo.records.errors import RewardError
from tpu_grpo.rewards.reward_call import Answer, Call, Caller, Problem, RewardBatch
from tpu_grpo.rewards.reward_functions import find_reward
from tpu_grpo.rewards.reward_runner import CLOSE_SECONDS, LATE, POLL_SECONDS, RewardBackend, RewardRunner, Task
from tpu_grpo.workers.channel import FOREIGN, BrokenChannelError
from tpu_grpo.workers.messages import Mode
from tpu_grpo.workers.supervisor import Session, StartError, Supervisor


@dataclass(eq=False)
class _Sent(Session):
    """A task that a worker has."""

    task: Task

    @override
    def replied(self, reply: Answer) -> None:
        if not reply.fits(self.task.asked):
            raise BrokenChannelError(FOREIGN)
        self.task.answers.append((self.task, reply))
        assert self.worker is not None, "it has replied"
        self.worker.group.release(self, 0.0)

    @override
    def late(self, *, has_begun: bool) -> None:
        self.task.fail(LATE)

    @override
    def lost(self, how: str) -> None:
        self.task.fail(Problem("died", f"lost its worker, which {how}"))  # the batch is not retried


class RewardService:
    """A reward as a `Service` (tpu_grpo/workers/messages.py); each worker answers one batch at a time."""

    mode: Mode = "serial"
    start = "set up"
    replies: tuple[type, ...] = (Answer,)
    most_bytes = 2**30

    def __init__(self, call: Call):
        self.call, self.name, self.secrets = call, f"reward {call.name}", call.secrets

    def set_up(self) -> None:
        """Find the reward and set it up; raises whatever the reward's code raises."""
        self._caller = Caller(self.call, find_reward(self.call.source))

    @contextmanager
    def answering(self, went_on: Callable[[], None]) -> Iterator[Callable[[RewardBatch, float], Answer]]:
        """Yield the function that calls the reward on a batch; close the reward at the end."""
        yield self._caller.answer
        self._caller.close()


class RewardProcesses(RewardBackend):
    """Runs a reward in up to ``count`` worker processes, which the first runner starts.

    Workers are replaced when they die, miss a deadline, or have had ``recycle`` calls.
    """

    def __init__(self, call: Call, memory_bytes: int, count: int, recycle: int):
        super().__init__()
        self._service, self._memory_bytes = RewardService(call), memory_bytes
        self._count, self._recycle = count, recycle
        self._supervisor: Supervisor | None = None
        self._problem: Problem | None = None

    @contextmanager
    def _opened(self, runner: RewardRunner) -> Iterator[None]:
        """Start the workers for a runner, and wait until they are set up. Raises RewardError if none ever was."""
        if self._supervisor is None:
            self._supervisor = Supervisor()
            self._group = self._supervisor.add(self._service, self._memory_bytes)
        wanted, group, self._problem = runner.left, self._group, None
        try:
            self.keep(wanted)
            while not (self._problem or runner.cancelled or all(worker.is_ready for worker in group.workers)):
                self.advance(POLL_SECONDS, is_starting=True)
            yield
        finally:
            self.give_up()
            for worker in [worker for worker in group.workers if worker.begun >= self._recycle]:
                group.end(worker, CLOSE_SECONDS)
        if not runner.cancelled:
            self.keep(wanted)

    def _end(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close(CLOSE_SECONDS)

    @override
    def wake(self) -> None:
        if (supervisor := self._supervisor) is not None:
            supervisor.wake()

    @property
    @override
    def problem(self) -> Problem | None:
        return self._problem

    @property
    @override
    def idle(self) -> int:
        return len(self._group.free_workers)

    @override
    def begin(self, task: Task, weight: float) -> None:
        self._group.call(_Sent(task), task.asked, task.until - time.monotonic(), weight)

    @override
    def give_up(self) -> None:
        for worker in [worker for worker in self._group.workers if worker.sessions]:
            for session in [*worker.sessions.values()]:
                self._group.release(session, 0.0)
            self._group.end(worker, 0.0)

    @override
    def keep(self, wanted: int) -> None:
        if self._problem is None:
            self._group.count = max(len(self._group.workers), min(self._count, wanted))
            self._group.fill()

    @override
    def advance(self, seconds: float, *, is_starting: bool = False) -> None:
        """Wait up to ``seconds`` for answers, and enforce deadlines. If a worker cannot be set up, that becomes the
        ``problem``; raises RewardError if no worker was ever set up."""
        group, supervisor = self._group, self._supervisor
        assert supervisor is not None, "only while a runner is served"
        try:
            if is_starting:
                group.starting.waited_for()
            supervisor.advance(0.0 if supervisor.hear(0.0) else seconds)
        except StartError as error:
            group.count = 0
            for worker in [worker for worker in group.workers if not worker.is_ready]:
                group.end(worker, 0.0)
            if not group.starting.was_ready:
                raise RewardError(str(error)) from None
            text, _, trace = str(error).removeprefix(f"{self._service.name} ").partition("\n")
            self._problem = Problem("died", text, trace=trace)
