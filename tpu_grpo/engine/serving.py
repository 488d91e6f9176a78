"""One batch of requests on all replicas of a run: dealt, advanced from one agreed point to the next, dealt again.

    served = Serving(requests, known, engines, drivers=[[0], [0], [1]], hosts=hosts).run()  # 3 replicas on 2 hosts

While groups wait that no replica has started, replicas stop after the same number of decode steps, hosts tell each
other what theirs have to do, and all compute the same dealing. From the moment when no group waits, nobody waits for
anybody. An engine that is alone has its own queue and needs no points.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tpu_grpo.engine.advancing import Waited, advance_all
from tpu_grpo.engine.conversing import Conversations
from tpu_grpo.engine.dealing import (
    Dealer,
    Load,
    divided_places,
    expected_tokens,
    host_told,
    make_groups,
    places_for,
    steps_between_points,
)
from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.generation import Finished
from tpu_grpo.engine.waves import Limits, Waves
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.stages import Completion, Request


@dataclass(frozen=True)
class Served:
    """What this host's engines did for a batch, and which replica has done what."""

    completions: Mapping[int, Completion]
    """Those that this host's replicas sampled, by the index of the request; of conversations those that this host is
    told of."""
    assigned: Sequence[Sequence[int]]
    """The indices of every replica's requests, in ascending order."""
    told: Sequence[int]
    """The host that was told of the end of each request."""
    steps: Mapping[int, tuple[int, int]]
    """For each of this host's replicas its decode steps and its clock at the end."""
    waited: Waited
    """The seconds in which no engine of this host was ready."""


class Serving:
    """A batch of requests, while all replicas of a run serve it; every host passes the same requests.

    Args:
        requests: what to sample.
        known: the tokens that are expected of each, where something is known.
        engines: this host's, by the replica's number.
        drivers: for every replica the hosts that drive it; the first speaks for it.
        hosts: the processes of the run.
        finished: is called with the index and the completion of each request as it ends, on the host that ``told``
            names.
        conversations: those of the requests, if their answers are conversations. The environment of each works on the
            host that ``told`` names.
        partners: for each of this host's replicas over several hosts those that drive it.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        known: Sequence[float | None] | None,
        engines: Mapping[int, Engine],
        drivers: Sequence[Sequence[int]],
        hosts: Hosts,
        finished: Finished | None = None,
        conversations: Conversations | None = None,
        partners: Mapping[int, Hosts] | None = None,
    ):
        self._drivers = drivers
        self._hosts = hosts
        self._finished = finished
        self._conversations = conversations
        self._partners = partners or {}
        expected = expected_tokens(requests, known)
        groups = make_groups(requests, expected, converse=conversations is not None)
        self._group_of = {index: group.number for group in groups for index in group.members}
        self._dealer = Dealer(groups, drivers)
        self._interval = steps_between_points(requests)
        shares = divided_places(None if conversations is None else conversations.places, drivers)
        self._generations = {
            number: engine.begin(
                requests,
                expected,
                self._tell(number),
                self._waves(number, engine.limits(requests, expected, shares[number])),
            )
            for number, engine in engines.items()
        }
        places = places_for(requests, expected, next(iter(engines.values())).options)
        self._loads = [
            Load(0, places if share is None else min(places, share * len(driven)))
            for share, driven in zip(shares, drivers, strict=True)
        ]

    def run(self) -> Served:
        """Sample all completions."""
        point, waited, generations = 0, Waited(), list(self._generations.values())
        while self._deal():
            point += self._interval
            waited = waited.plus(advance_all(generations, point))
            self._loads = self._gather(point)
        waited = waited.plus(advance_all(generations))
        completions = {i: completion for g in generations for i, completion in g.completions.items()}
        steps = {number: (g.steps, g.clock) for number, g in self._generations.items()}
        return Served(completions, self._dealer.assigned, self._dealer.told, steps, waited)

    def _deal(self) -> bool:
        """Deal what has not been started; says whether it has to be dealt again, at the next agreed point."""
        dealt = self._dealer.deal(self._loads)
        for number, generation in self._generations.items():
            generation.hold(dealt[number])
        return self._dealer.waits and len(self._drivers) > 1

    def _gather(self, point: int) -> list[Load]:
        """Tell the other hosts what this host's replicas have to do at a point, and hear of all."""
        mine = {number: asdict(generation.pause(point)) for number, generation in self._generations.items()}
        everyone = [
            json.loads(part) for part in self._hosts.gather("what replicas have to do", json.dumps(mine).encode())
        ]
        return [Load(**everyone[drivers[0]][str(number)]) for number, drivers in enumerate(self._drivers)]

    def _tell(self, number: int) -> Finished | None:
        """Make the call for a replica's completions, of which this host passes on its own."""
        finished, drivers = self._finished, self._drivers[number]
        if finished is None or self._hosts.index not in drivers:
            return None

        def tell(index: int, completion: Completion) -> None:
            if self._told(number, index) == self._hosts.index:
                finished(index, completion)

        return tell

    def _waves(self, number: int, limits: Limits) -> Waves | None:
        """Make what brings the turns of a replica's rows, if answers are conversations."""
        if self._conversations is None:
            return None
        return Waves(
            self._conversations,
            limits,
            host_of=lambda row: self._told(number, row),
            here=self._hosts.index,
            partners=self._partners.get(number),
        )

    def _told(self, number: int, index: int) -> int:
        """Return the host that is told of a request, if this replica serves it."""
        return host_told(self._group_of[index], self._drivers[number], len(self._drivers))
