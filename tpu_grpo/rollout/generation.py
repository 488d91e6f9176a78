"""Requests on their way through one engine.

Requests of one group (equal prompts) are found by their token ids: the first one prefills the prompt, the others wait
for it and reuse it.
"""

from collections.abc import Sequence

from tpu_grpo.rollout.scheduler import Running, SteppedScheduler
from tpu_grpo.types import Completion, Request


class Generation:
    """Requests on their way through an engine, one at a time per engine; ``advance`` until it says no.

    Each call takes in the tokens of the step before and starts the next, so that engines on different devices work at
    the same time when they are advanced in turn.
    """

    def __init__(
        self, scheduler: SteppedScheduler, requests: Sequence[Request], stop_ids: frozenset[int], *, share: bool
    ):
        self._scheduler = scheduler
        self._requests = requests
        self._stop_ids = stop_ids
        self._rows: list[Running | None] = [None] * len(requests)
        self._followers: dict[int, list[int]] = {}
        for leader, members in groups(requests, share=share):
            self._submit(leader)
            if members:
                self._followers[leader] = members

    def advance(self) -> bool:
        """Finish the step under way and start the next; False once every request is finished."""
        self._scheduler.finish_step()
        if not self._followers and all(row is not None and row.req.finished() for row in self._rows):
            self._scheduler.start_step()  # an empty one: hands back the slots of the last rows
            self._scheduler.running.clear()
            return False
        for leader in [i for i in self._followers if (row := self._rows[i]) is not None and row.prefilled]:
            for member in self._followers.pop(leader):
                self._submit(member)
        self._scheduler.start_step()
        return True

    def completions(self) -> list[Completion]:
        """In the order of the requests, once all are finished."""
        return [row.completion() for row in self._rows if row is not None]

    def _submit(self, index: int) -> None:
        self._rows[index] = self._scheduler.submit(self._requests[index], self._stop_ids)


def groups(requests: Sequence[Request], *, share: bool = True) -> list[tuple[int, list[int]]]:
    """(leader, followers) index lists, leaders in order; every request leads itself when nothing is shared.

    A group is the requests with the same prompt: their token ids are what can be shared.
    """
    if not share:
        return [(index, []) for index in range(len(requests))]
    members: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        members.setdefault(request.token_ids, []).append(index)
    return [(first, rest) for first, *rest in members.values()]
