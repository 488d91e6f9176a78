"""A batch of requests while an engine serves it.

Requests with equal prompts form a group. The first of them prefills the prompt; the others wait for it and reuse its
cached keys and values.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from tpu_grpo.rollout.running import RunningRequest
from tpu_grpo.rollout.scheduler import SteppedScheduler
from tpu_grpo.types import Completion, Request

POLL_SECONDS = 0.0002
"""While no engine is ready, this long passes between two looks."""
Finished = Callable[[int, Completion], None]
"""Is told the index of a request and its completion, once, as soon as it has ended; on the thread that generates."""


class Generation:
    """A batch of requests in an engine, which serves one batch at a time. Call ``advance`` until it returns False.

    Each call collects the tokens of the launch before and starts the next one. Engines on different devices therefore
    work at the same time if each is advanced once it is ``ready``.
    """

    def __init__(
        self,
        scheduler: SteppedScheduler,
        requests: Sequence[Request],
        stop_ids: frozenset[int],
        finished: Finished | None = None,
        *,
        share: bool,
    ):
        self._scheduler = scheduler
        self._requests = requests
        self._stop_ids = stop_ids
        self._finished = finished
        self._rows: list[RunningRequest | None] = [None] * len(requests)
        self._completions: dict[int, Completion] = {}
        self._followers: dict[int, list[int]] = {}
        for leader, members in prompt_groups(requests, share=share):
            self._submit(leader)
            if members:
                self._followers[leader] = members

    @property
    def ready(self) -> bool:
        """Whether ``advance`` would not have to wait for the devices."""
        return self._scheduler.ready

    def advance(self) -> bool:
        """Finish the launch in flight and start the next; returns False once every request is finished.

        Whoever waits for completions is told while the devices work at the next launch.
        """
        self._scheduler.finish()
        ended = self._ended()
        self._completions |= ended
        if len(self._completions) == len(self._requests):
            self._scheduler.start()  # an empty one, which hands back the slots of the last rows
            self._scheduler.running.clear()
            self._tell(ended)
            return False
        for leader in [i for i in self._followers if (row := self._rows[i]) is not None and row.prefilled]:
            for member in self._followers.pop(leader):
                self._submit(member)
        self._scheduler.start()
        self._tell(ended)
        return True

    def completions(self) -> list[Completion]:
        """List the completions in the order of the requests; call it once all are finished."""
        return [self._completions[index] for index in range(len(self._requests))]

    def _ended(self) -> dict[int, Completion]:
        """Return what has ended since the last call, by the index of the request."""
        return {
            index: row.completion()
            for index, row in enumerate(self._rows)
            if row is not None and index not in self._completions and row.req.finished()
        }

    def _tell(self, ended: Mapping[int, Completion]) -> None:
        if self._finished is not None:
            for index, completion in ended.items():
                self._finished(index, completion)

    def _submit(self, index: int) -> None:
        self._rows[index] = self._scheduler.submit(self._requests[index], self._stop_ids)


def prompt_groups(requests: Sequence[Request], *, share: bool = True) -> list[tuple[int, list[int]]]:
    """Group requests with the same prompt token ids.

    Returns:
        For each group the index of its first request, which prefills the prompt, and the indices of the others. The
        groups are in the order of their first requests. With ``share=False`` every request is a group of its own.
    """
    if not share:
        return [(index, []) for index in range(len(requests))]
    members: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        members.setdefault(request.token_ids, []).append(index)
    return [(first, rest) for first, *rest in members.values()]


def advance_all(generations: Sequence[Generation]) -> float:
    """Advance several generations to their ends, each as soon as its engine's devices have finished a launch.

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
        ended = [generation for generation in ready if not generation.advance()]
        active = [generation for generation in active if generation not in ended]
    while active and active[0].advance():
        pass
    return waited
