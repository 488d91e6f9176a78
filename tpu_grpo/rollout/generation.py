"""A batch of requests while an engine serves it.

Requests with equal prompts form a group. The first of them prefills the prompt; the others wait for it and reuse its
cached keys and values. A group is started when there is a place for one of its rows, in the order in which groups are
held. Time is counted in decode steps, which are the same on every machine.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tpu_grpo.rollout.dealing import Group, Load
from tpu_grpo.rollout.running import RunningRequest
from tpu_grpo.rollout.scheduler import SteppedScheduler
from tpu_grpo.types import Completion, Request

POLL_SECONDS = 0.0002
"""While no engine is ready, this long passes between two looks."""
Finished = Callable[[int, Completion], None]
"""Is told the index of a request and its completion, once, as soon as it has ended; on the thread that generates."""


class Partial(NamedTuple):
    """Holds what there is of an answer."""

    token_ids: Sequence[int]
    completion: Completion | None
    """The whole completion, once it has ended."""


class Generation:
    """Those of a batch's requests that one engine serves; ``hold`` says which. Call ``advance`` until it returns False.

    Each call collects the tokens of the launch before and starts the next one. Engines on different devices therefore
    work at the same time if each is advanced once it is ``ready``.
    """

    def __init__(
        self,
        scheduler: SteppedScheduler,
        requests: Sequence[Request],
        stop_ids: frozenset[int],
        *,
        expected: Sequence[int],
        places: int,
        finished: Finished | None = None,
        share: bool = True,
    ):
        """Serve nothing yet.

        Args:
            scheduler: the engine's.
            requests: the whole batch; indices count these.
            stop_ids: tokens that end a completion.
            expected: the tokens that are expected of each request.
            places: how many rows to start at once; then it is one group after another, until requests have to wait.
            finished: is told of every completion as it ends.
            share: whether requests of a group reuse the prompt of the first.
        """
        self._scheduler = scheduler
        self._requests = requests
        self._stop_ids = stop_ids
        self._expected = expected
        self._places = places
        self._finished = finished
        self._share = share
        self._held: deque[Group] = deque()
        self._followers: dict[int, tuple[int, ...]] = {}
        self._running: dict[int, RunningRequest] = {}
        self._first_step = scheduler.use.steps
        self._idle_steps = 0
        self.completions: dict[int, Completion] = {}
        """What has ended so far, by the index of the request."""

    def hold(self, groups: Sequence[Group]) -> None:
        """Serve these groups next, in their order, in place of those that are held and have not been started."""
        self._held = deque(groups)

    @property
    def ready(self) -> bool:
        """Whether ``advance`` would not have to wait for the devices."""
        return self._scheduler.ready

    @property
    def steps(self) -> int:
        """Decode steps so far."""
        return self._scheduler.use.steps - self._first_step

    @property
    def clock(self) -> int:
        """Decode steps so far, and those in which others worked and this engine had nothing to do."""
        return self.steps + self._idle_steps

    def advance(self, until: int | None = None) -> bool:
        """Finish the launch in flight and start the next; returns False once there is nothing left to do.

        With ``until``, it also returns False when the clock is there, which no launch passes. Whoever waits for
        completions is told while the devices work at the next launch.
        """
        self._scheduler.finish()
        ended = self._ended()
        self.completions |= ended
        paused = until is not None and self.clock >= until
        if not paused:
            self._fill()
        if going_on := not paused and self._rows > 0:
            self._start(None if until is None else until - self.clock)
        elif not self._rows and self._scheduler.running:
            self._scheduler.start()  # an empty one, which hands back the slots of the last rows
            self._scheduler.running.clear()
        if self._finished is not None:
            for index, completion in ended.items():
                self._finished(index, completion)
        return going_on

    def partial(self, index: int) -> Partial:
        """Return what there is of a request's answer; nothing of one that has not been started."""
        if (completion := self.completions.get(index)) is not None:
            return Partial(completion.token_ids.tolist(), completion)
        running = self._running.get(index)
        return Partial(() if running is None else list(running.req.output_ids), None)

    def cancel(self) -> None:
        """Let every request end with the tokens that it has after the launch in flight, and start no other.

        The scheduler takes each for one that has reached its last token; ``advance`` still has to be called.
        """
        self._held.clear()
        self._followers.clear()
        for running in self._running.values():
            running.req.sampling_params.max_new_tokens = 1

    def pause(self, point: int) -> Load:
        """Say at an agreed point what there is to do; an engine that had nothing to do before it was idle until now."""
        self._idle_steps += max(0, point - self.clock)
        left = (max(1, self._expected[i] - len(row.req.output_ids)) for i, row in self._running.items())
        waiting = sum(self._expected[i] for members in self._followers.values() for i in members)
        return Load(self._rows, self._places, sum(left) + waiting, tuple(group.number for group in self._held))

    @property
    def _rows(self) -> int:
        """Requests of started groups that have not ended."""
        return len(self._running) + sum(map(len, self._followers.values()))

    def _ended(self) -> Mapping[int, Completion]:
        """Take out the requests that have ended since the last call."""
        done = [index for index, row in self._running.items() if row.req.finished()]
        return {index: self._running.pop(index).completion() for index in done}

    def _fill(self) -> None:
        """Submit what can run: the first requests of held groups, and those that waited for the first of theirs."""
        for leader in [i for i in self._followers if i not in self._running or self._running[i].prefilled]:
            self._submit(*self._followers.pop(leader))
        if not self._scheduler.waiting_queue and not self._followers:  # nothing shows that the engine is full
            self._places = min(max(self._places, self._rows + 1), self._scheduler.max_running_requests)
        while self._held and self._rows < self._places:
            leader, *members = self._held.popleft().members
            self._submit(leader)
            if members and self._share:
                self._followers[leader] = tuple(members)
            else:
                self._submit(*members)

    def _start(self, most_steps: int | None) -> None:
        """Launch, and note how many rows can run, if requests wait beside decode steps."""
        scheduler = self._scheduler
        ahead = most_steps is None and not self._held and not self._followers  # all requests are in the scheduler
        scheduler.start(most_steps=most_steps, more_wait=bool(self._held), ahead=ahead)
        flight = scheduler.in_flight
        if flight is not None and flight.reservation is not None and scheduler.waiting_queue:
            self._places = len(flight.batch.reqs)

    def _submit(self, *indices: int) -> None:
        for index in indices:
            self._running[index] = self._scheduler.submit(self._requests[index], self._stop_ids)


def advance_all(generations: Sequence[Generation], until: int | None = None) -> float:
    """Advance several generations to their ends, or to an agreed point, each as soon as its devices have finished.

    No engine waits for another. Engines of one process lie inside its host, so that the order of their launches, which
    may differ from host to host, is nobody else's business; an engine over several hosts is the only one of each.

    Returns:
        The seconds in which no engine was ready.
    """
    active, waited = list(generations), 0.0
    while len(active) > 1:
        ready = [generation for generation in active if generation.ready]
        if not ready:
            start = time.perf_counter()
            time.sleep(POLL_SECONDS)
            waited += time.perf_counter() - start
        stopped = [generation for generation in ready if not generation.advance(until)]
        active = [generation for generation in active if generation not in stopped]
    while active and active[0].advance(until):
        pass
    return waited
