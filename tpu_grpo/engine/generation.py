"""Serves a batch of requests on one engine, launch by launch.

Requests with equal prompts form a group. The first request prefills the prompt; the others wait for it and reuse the
cached keys and values. ``Generation.hold`` takes the groups in the order in which to start them; a group starts when
one of its rows (requests) can run. Time is counted in decode steps, not in seconds.

If completions are conversations, a request is one turn, and a row is "out" while its environment works; see turns.py.
If no row can be decoded, the clock jumps to the step at which the first environment's answer is due.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from tpu_grpo.engine.load_balancing import Group, Load, places_for
from tpu_grpo.engine.partial_rollouts import Cutoff
from tpu_grpo.engine.scheduler import EngineUse, RunningRequest, SteppedScheduler
from tpu_grpo.engine.turns import Turns
from tpu_grpo.records.stages import Completion, Request

Finished = Callable[[int, Completion], None]
"""Called once with a request's index and its completion, as soon as the request has ended, on the calling thread."""
POLL_SECONDS = 0.0002
"""The seconds between two polls while no engine is ready."""


class Generation:
    """Serves, on one engine, the groups of requests passed to ``hold``. Call ``advance`` until it returns False.

    Each call collects the tokens of the previous launch and starts the next one. Engines on different devices therefore
    compute concurrently if each is advanced once it is ``ready``.
    """

    def __init__(
        self,
        scheduler: SteppedScheduler,
        requests: Sequence[Request],
        expected: Sequence[int],
        turns: Turns,
        finished: Finished | None = None,
        cut: Cutoff | None = None,
    ):
        """Start without requests to serve; pass them to ``hold``.

        Args:
            scheduler: the engine's scheduler.
            requests: all requests of the batch, also those of other engines; indices refer to this sequence.
            expected: the expected number of tokens of each request.
            turns: supplies the requests of all turns, if completions are conversations.
            finished: called with every completion as it ends.
            cut: records every completion that ends; once ``cut.length`` is known, rows stop at that many tokens.
        """
        self._scheduler, self._requests, self._expected = scheduler, requests, expected
        self._turns, self._finished, self._cut = turns, finished, cut
        self._places = places_for(requests, expected, scheduler.runner.options)
        """The number of rows to run at once. It grows group by group until requests wait, and then shrinks."""
        self._held: deque[Group] = deque()
        self._followers: dict[int, list[tuple[int, Request]]] = {}
        """The requests that wait for their prompt, by the index of the request that prefills it."""
        self._running: dict[int, RunningRequest] = {}
        self._first_step, self._idle_steps = scheduler.use.steps, 0
        self._late, self._untold = False, dict[int, Completion]()
        self.completions: dict[int, Completion] = {}
        """The completions that have ended so far, by the index of the request."""

    def hold(self, groups: Sequence[Group]) -> None:
        """Serve these groups next, in this order. They replace the groups of earlier calls that have not started."""
        self._held = deque(groups)

    @property
    def ready(self) -> bool:
        """Whether ``advance`` can return without waiting for the devices or for an environment's answer that is due."""
        return self._turns.ready(self.clock) if self._late else self._scheduler.ready

    @property
    def computing(self) -> bool:
        """Whether a launch is in flight on the devices."""
        return self._scheduler.in_flight is not None

    @property
    def steps(self) -> int:
        """The number of decode steps of this generation so far."""
        return self._scheduler.use.steps - self._first_step

    @property
    def clock(self) -> int:
        """The decode steps so far, plus steps skipped while this engine waited for other engines or environments."""
        return self.steps + self._idle_steps

    def advance(self, until: int | None = None, *, wait: bool = True) -> bool:
        """Finish the launch in flight and start the next; returns False once there is nothing left to do.

        ``until`` is a step that no launch goes beyond; when the clock reaches it, the method returns False as well.
        Completions are reported while the devices compute the next launch. With ``wait=False`` nothing is launched
        while an environment's answer is due but missing: ``ready`` says when to call again.
        """
        self._scheduler.finish()
        for index in [index for index, row in self._running.items() if row.req.finished()]:
            row = self._running.pop(index)
            turn, use = row.completion(), self._scheduler.use
            if not self._turns.converses:
                if self._cut is not None:
                    self._cut.add(index, row.request, turn)
                self._keep(index, turn)
                continue
            use.turns += 1
            if not self._turns.ended(index, row.request, turn, self.clock):
                use.later_tokens += len(row.request.token_ids)
                use.later_cached += turn.cached_tokens
        going_on = self._prepare(until, wait=wait)
        if self._cut is not None and (length := self._cut.length) is not None:
            self._limit(length)
        if going_on and not self._late:
            self._start(None if until is None else until - self.clock)
        elif not self._rows and self._scheduler.running:
            self._scheduler.start()  # launches nothing, but frees the slots of the last rows
            self._scheduler.running.clear()
        self._tell()
        return going_on

    def _limit(self, tokens: int) -> None:
        """End requests with this many tokens, or after the current launch if they have more already."""
        for running in self._running.values():
            sampling = running.req.sampling_params
            sampling.max_new_tokens = min(sampling.max_new_tokens, max(1, tokens))

    def pause(self, point: int) -> Load:
        """Return the engine's load at the synchronization point, and count the steps up to ``point`` as idle."""
        self._idle_steps += max(0, point - self.clock)
        return Load(self._places - self._free, self._places, self._left, tuple(group.number for group in self._held))

    @property
    def _inside(self) -> int:
        """The number of requests that are in the scheduler or wait for the first request of their group."""
        return len(self._running) + sum(map(len, self._followers.values()))

    @property
    def _rows(self) -> int:
        """The number of requests (or conversations) that belong to started groups and have not ended."""
        return self._inside + len(self._turns.out)

    @property
    def _free(self) -> int:
        """The number of rows that can be started now; below 0 if more rows run than there are places now."""
        kept = max(self._turns.limits.kept, self._places)
        return min(self._places - self._inside, kept - self._rows, self._turns.room)

    @property
    def _left(self) -> int:
        """Tokens that are still expected of started rows."""
        sampled = dict.fromkeys([*self._turns.out, *(i for rows in self._followers.values() for i, _ in rows)], 0)
        sampled |= {i: len(row.req.output_ids) for i, row in self._running.items()}
        return sum(max(1, self._expected[i] - tokens - self._turns.sampled[i]) for i, tokens in sampled.items())

    def _tell(self) -> None:
        """Send turns to environments, and completions to the caller."""
        self._turns.tell()
        untold, self._untold = self._untold, {}
        if self._finished is not None:
            for index, completion in untold.items():
                self._finished(index, completion)

    def _prepare(self, until: int | None, *, wait: bool) -> bool:
        """Submit all that can run now; returns whether there is anything to do before ``until``.

        The loop is needed because a conversation that ends makes room for a group, whose rows are out immediately.
        """
        self._late = False
        while until is None or self.clock < until:
            self._fill()
            if (due := self._turns.next_due) is None:
                return self._inside > 0
            if not self._inside:  # the clock jumps
                self._idle_steps += max(0, (due if until is None else min(due, until)) - self.clock)
                if until is not None and self.clock >= until:
                    break
            if due > self.clock:
                return True
            self._tell()  # environments get the turns that they wait for
            decodes_on = self._turns.as_answered and self._inside > 0
            if (decodes_on or not wait) and not self._turns.ready(self.clock):
                self._late = not decodes_on
                return True
            with self._scheduler.use.time("environments"):
                wave = self._turns.take(self.clock)
            for index, request in wave.items():
                if request is None and (whole := self._turns.result(index)) is not None:
                    self._keep(index, whole)
            self._admit([(index, request) for index, request in wave.items() if request is not None])
        return False

    def _keep(self, index: int, completion: Completion) -> None:
        self.completions[index] = self._untold[index] = completion

    def _fill(self) -> None:
        """Submit what can run: first requests of held groups, and requests whose prompt has been prefilled by now.

        A request with sampled tokens has its prompt in the cache, where requests with the same prompt can reuse it.
        """
        for leader in [i for i in self._followers if i not in self._running or self._running[i].req.output_ids]:
            for index, request in self._followers.pop(leader):
                self._running[index] = self._scheduler.submit(request)
        if not self._scheduler.waiting_queue and not self._followers:  # nothing shows that the engine is full
            self._places = min(max(self._places, self._inside + 1), self._scheduler.max_running_requests)
        while self._held and self._free > 0:
            members = self._held.popleft().members
            if self._turns.converses:
                self._turns.begin(members, self.clock)
            else:
                self._admit([(index, self._requests[index]) for index in members])

    def _admit(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Submit requests. Of those with equal prompts, only the first is submitted now, to prefill the prompt."""
        leaders, share = dict[tuple[int, ...], int](), self._scheduler.runner.options.prefix_cache
        for index, request in requests:
            leader = leaders.setdefault(request.token_ids, index) if share else index
            if leader == index:
                self._running[index] = self._scheduler.submit(request)
            else:
                self._followers.setdefault(leader, []).append((index, request))

    def _start(self, most_steps: int | None) -> None:
        """Start a launch. If requests wait during decode steps, the engine is full: ``_places`` is set to the number of
        rows of this launch."""
        scheduler = self._scheduler
        ahead = most_steps is None and not self._held and not self._followers  # all requests are in the scheduler
        if ahead and self._turns.converses:  # ahead only if no row returns before the next launch
            due = self._turns.next_due
            ahead = not self._turns.as_answered if due is None else due > self.clock + scheduler.programs.steps
        scheduler.start(most_steps=most_steps, more_wait=bool(self._held) or self._turns.more_wait, ahead=ahead)
        flight = scheduler.in_flight
        if flight is not None and flight.reservation is not None and scheduler.waiting_queue:
            self._places = len(flight.batch.reqs)


def advance_all(generations: Sequence[Generation], until: int | None = None) -> EngineUse:
    """Advance several generations to their ends, or to a synchronization point, each as soon as it is ready.

    No engine waits for another. If a process has several engines, all lie inside its host, so the order of their
    launches may differ between hosts. An engine over several hosts is the only engine of each of these hosts.

    Returns the seconds in which no engine was ready: in the field ``wait`` if some engine had a launch in flight, else
    in ``environments``. Both are 0 for a single engine, which counts these seconds in its own ``use``.
    """
    active, waited = list(generations), EngineUse()
    while len(active) > 1:
        ready = [generation for generation in active if generation.ready]
        if not ready:
            start, computing = time.perf_counter(), any(generation.computing for generation in active)
            time.sleep(POLL_SECONDS)
            seconds = time.perf_counter() - start
            waited.wait += seconds if computing else 0.0
            waited.environments += 0.0 if computing else seconds
        stopped = [generation for generation in ready if not generation.advance(until, wait=False)]
        active = [generation for generation in active if generation not in stopped]
    while active and active[0].advance(until):
        pass
    return waited
