"""Assigns ("deals") groups of requests to replicas, the groups with the longest expected answers first.

    groups = make_groups(requests, expected_tokens(requests, known))
    dealer = Dealer(groups, drivers=[[0], [0, 1]])     # two replicas, and the hosts that drive them
    dealer.deal(loads)          # at the start: two idle replicas
    dealer.deal(loads)          # at every synchronization point while groups wait
    dealer.assigned             # the requests of each replica, once no group waits

A replica can run a limited number of rows (requests) at once: it has that many places. It starts a group when one place
is free. Groups that have not been started are dealt again at every synchronization point, so that an idle replica takes
over groups from a busy one. Example: two replicas of 2 places, and groups of one request, named by their expected
tokens 9 7 5 4 2 1:

    at the start    replica 0 runs 9 and 4 (13 tokens), and 1 waits there;  replica 1 runs 7 and 5 (12), and 2 waits
    at a point      replica 1 has finished 7, 5 and 2, and takes over 1, for which replica 0 has no place yet

The dealing depends only on the requests, the expected tokens and the tokens sampled so far, so that every host
computes the same assignment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tpu_grpo.engine.options import EngineOptions
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.records.stages import Request

POINTS = 32
"""About how many synchronization points the longest completion has, while groups wait to be started."""
FEWEST_STEPS = 16
"""Synchronization points are at least this many decode steps apart, because at each, hosts wait for the slowest
replica."""


@dataclass(frozen=True)
class Group:
    """Requests with the same prompt. One replica serves all, so that only the first request prefills the prompt."""

    number: int
    members: tuple[int, ...]
    """The requests' indices, ascending."""
    tokens: int
    """The expected number of tokens of all requests together."""


@dataclass(frozen=True)
class Load:
    """The work of a replica at a synchronization point."""

    rows: int
    """The number of unfinished requests in started groups."""
    places: int
    """The number of requests that the replica can run at once."""
    tokens: int = 0
    """The number of tokens that these unfinished requests are still expected to sample."""
    held: tuple[int, ...] = ()
    """The numbers of the groups that were dealt to the replica and that it has not started."""


def expected_tokens(requests: Sequence[Request], known: Sequence[float | None] | None = None) -> list[int]:
    """Return the expected number of tokens of each request: its value in ``known``, if that is not None.

    Other requests get the mean of the known values, or half of the largest ``max_new_tokens`` if no value is known.
    """
    known = known or [None] * len(requests)
    given = [value for value in known if value is not None]
    allowed = max((request.sampling.max_new_tokens for request in requests), default=1)
    mean = sum(given) / len(given) if given else allowed / 2
    return [max(1, round(mean if value is None else value)) for value in known]


def rows_kept(requests: Sequence[Request], expected: Sequence[int], options: EngineOptions) -> int:
    """Return about how many of these requests a cache can hold at once, assuming that all have the mean length."""
    needed = sum(
        options.tokens_of_request(len(request.token_ids) + tokens)
        for request, tokens in zip(requests, expected, strict=True)
    )
    return max(1, options.cache_tokens * len(requests) // max(1, needed))


def places_for(requests: Sequence[Request], expected: Sequence[int], options: EngineOptions) -> int:
    """Return about how many of these requests an engine can run at once, given its cache and their mean length."""
    return min(options.max_running_requests, rows_kept(requests, expected, options))


def make_groups(requests: Sequence[Request], expected: Sequence[int], *, converse: bool = False) -> list[Group]:
    """Group requests with the same prompt token ids, longest expected answers first.

    Groups are sorted by the mean of their expected tokens; equal ones are in the order of their first requests. With
    ``converse``, two prompts with equal token ids make two groups, because the prompts have different environments.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        apart = (request.key.prompt,) if converse else ()
        members.setdefault((*request.token_ids, *apart), []).append(index)
    groups = [
        Group(number, tuple(group), sum(expected[index] for index in group))
        for number, group in enumerate(members.values())
    ]
    return sorted(groups, key=lambda group: (-group.tokens / len(group.members), group.number))


def steps_between_points(requests: Sequence[Request]) -> int:
    """Return the decode steps between two synchronization points."""
    longest = max((request.sampling.max_new_tokens for request in requests), default=1)
    return max(FEWEST_STEPS, longest // POINTS)


def reporting_host(group: int, drivers: Sequence[int], replicas: int) -> int:
    """Choose one of ``drivers``, the hosts that a group's replica runs on, to report the group's completions.

    The hosts take turns, by the number of the group, and every host computes the same choice.
    """
    return drivers[group // replicas % len(drivers)]


def divided_places(places: int | None, drivers: Sequence[Sequence[int]]) -> list[int | None]:
    """Divide the number of environments that each host may run at once among the replicas that it drives.

    Args:
        places: the number of environments per host; None for any number.
        drivers: the hosts that each replica runs on. One host may have several replicas, or several hosts one replica.

    Raises:
        ConfigError: if a host has fewer places than replicas, since each replica needs one.
    """
    if places is None:
        return [None] * len(drivers)
    shares: list[int | None] = []
    for number, (host, *_) in enumerate(drivers):
        beside = [other for other, hosts in enumerate(drivers) if host in hosts]
        if places < len(beside):
            raise ConfigError(
                f"environment.workers must be at least the {len(beside)} engines of a host, of which each has "
                f"environments of its own, got {places}; raise it, or set it to auto, or give engines more devices "
                "with meshes.sampler.tensor"
            )
        shares.append(places // len(beside) + (beside.index(number) < places % len(beside)))
    return shares


class Dealer:
    """Deals groups to replicas, and remembers which replica has which group."""

    def __init__(self, groups: Sequence[Group], drivers: Sequence[Sequence[int]]):
        """Take the groups in the order in which they are to start, and for every replica the hosts that drive it."""
        self._groups = {group.number: group for group in groups}
        self._owners: dict[int, int] = {}
        self._drivers = drivers
        self.waits = False
        """Whether the last ``deal`` left a replica with groups that it cannot start immediately."""

    def deal(self, loads: Sequence[Load]) -> list[list[Group]]:
        """Deal all groups that have not been started, and return those of each replica, in the order of their start.

        Each group goes to the replica where the fewest of its rows have to wait for a place. Ties go to the replica
        with the fewest expected tokens, then to the first replica.
        """
        held = {number for load in loads for number in load.held}
        rows, tokens = [load.rows for load in loads], [load.tokens for load in loads]
        dealt: list[list[Group]] = [[] for _ in loads]
        for number, group in self._groups.items():
            if number in self._owners and number not in held:
                continue
            places = [max(0, load.places - now) for load, now in zip(loads, rows, strict=True)]
            size = len(group.members)
            best = min(range(len(loads)), key=lambda r: (max(0, size - places[r]), tokens[r], r))
            dealt[best].append(group)
            rows[best] += size
            tokens[best] += group.tokens
            self._owners[number] = best
        self.waits = any(  # for the place that the first row of the last group needs
            bool(groups) and now - len(groups[-1].members) >= load.places
            for groups, now, load in zip(dealt, rows, loads, strict=True)
        )
        return dealt

    @property
    def assigned(self) -> list[list[int]]:
        """The indices of each replica's requests, in ascending order."""
        shares: list[list[int]] = [[] for _ in self._drivers]
        for number, owner in self._owners.items():
            shares[owner] += self._groups[number].members
        return [sorted(share) for share in shares]

    @property
    def reporting_hosts(self) -> list[int]:
        """For each request, the host that reports its completion."""
        host_of = {
            index: reporting_host(number, self._drivers[owner], len(self._drivers))
            for number, owner in self._owners.items()
            for index in self._groups[number].members
        }
        return [host_of[index] for index in range(len(host_of))]
