"""Conversations in the engine: the rows whose environments are working, and the waves in which these rows return.

A row (one conversation) is out while its environment works: from the start of its group, and from the end of each turn.
The row is due ``tool_steps`` decode steps later, by the engine's clock. Before the next launch, all due rows return
together (a wave), in ascending order of their numbers; the engine waits for missing answers. So the step at which a row
returns depends only on requests and tokens, not on wall-clock time. For ``tool_steps`` 16 and launches of 16 steps:

    clock 16 to 32      rows 3 and 5 ended a turn at 16 and are out, while a launch decodes other rows
    clock 32            rows 3 and 5 are due and return in one wave, row 3 first

With ``tool_steps`` 0, a row returns before the first launch after its environment's answer, and waits for no other row.
Then wall-clock time decides which rows decode together. With the same weights, float32 tokens do not depend on this,
but the last bits of their log-probabilities may. In bfloat16, even the tokens may depend on it.

The number of environments that a host runs at once may be limited (``places``). Then a row without a place begins when
another conversation is over.

If a replica spans several hosts, a row's environment is on the host that reports the completions of its group. In one
exchange per wave, each host sends the requests of its own rows to the others, and all hosts check that they agree on
the wave's rows and on these rows' past tokens.
"""

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import override

import numpy as np

from tpu_grpo.engine.turns import Conversations, Limits, Turns
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.records.stages import Completion, Request

_POLL_SECONDS = 0.005

Wave = tuple[str, dict[int, tuple[int, Request] | None]]
"""What hosts send each other in JSON: the digest of a wave, and an entry for each row. The entry has the length
of the prefix that the request shares with the row's past, and the request without this prefix. The entry is None if the
conversation is over."""


class TurnScheduler(Turns):
    """The rows of one replica whose environments are working. All hosts that drive the replica must make the same
    calls."""

    converses = True

    def __init__(
        self,
        conversations: Conversations,
        limits: Limits,
        *,
        host_of: Callable[[int], int] = lambda row: 0,
        here: int = 0,
        partners: Hosts | None = None,
    ):
        """Begin with no row out.

        Args:
            conversations: the conversations of the whole batch; this host calls them only for rows whose environments
                it has.
            limits: the limits of the replica's engine.
            host_of: returns the host that has the environment of a row.
            here: the number of this host.
            partners: the hosts that drive the replica, if there are several.
        """
        super().__init__(limits)
        self._conversations = conversations
        self.as_answered = limits.tool_steps == 0
        self._host_of, self._here = host_of, here
        self._partners = partners
        self._waiting: deque[int] = deque()
        self._placed: Counter[int] = Counter()
        """How many conversations have an environment on each host."""
        self._due: dict[int, int] = {}
        self._pasts: dict[int, tuple[int, ...]] = {}
        self._owed: list[tuple[int, Completion | None]] = []
        self._answered, self._ask_at = set[int](), 0.0
        """With 0 ``tool_steps``: the rows that had an answer when they were asked last, and when to ask again."""

    @override
    def begin(self, rows: Sequence[int], clock: int) -> None:
        self._waiting.extend(rows)
        self._fill(clock)

    @override
    def ended(self, row: int, request: Request, turn: Completion, clock: int) -> bool:
        first = row not in self._pasts
        self.sampled[row] += len(turn.token_ids)
        self._pasts[row] = (*request.token_ids, *turn.token_ids.tolist())
        self._send(row, turn, clock)
        return first

    @override
    def tell(self) -> None:
        owed, self._owed = self._owed, []
        for row, turn in owed:
            if turn is None:
                self._conversations.begin(row)
            else:
                self._conversations.ended(row, turn)

    @property
    @override
    def next_due(self) -> int | None:
        return min(self._due.values(), default=None)

    @property
    @override
    def out(self) -> list[int]:
        return [*self._due, *self._waiting]

    @property
    @override
    def room(self) -> int:
        if self.limits.places is None:
            return 2**31
        hosts = 1 if self._partners is None else len(self._partners.members)
        return hosts * self.limits.places - self._placed.total() - len(self._waiting)

    @property
    @override
    def more_wait(self) -> bool:
        return bool(self._waiting)

    @override
    def ready(self, clock: int) -> bool:
        if self.as_answered:
            return bool(self._at(clock))
        return all(self._conversations.ready(row) for row in self._at(clock) if self._holds(row))

    @override
    def take(self, clock: int) -> Mapping[int, Request | None]:
        while not (rows := self._at(clock)) and self.as_answered and self._due:
            time.sleep(_POLL_SECONDS)
        requests = {row: self._conversations.next(row) for row in rows if self._holds(row)}
        if self._partners is not None:
            requests = self._exchange(self._partners, clock, rows, requests)
        for row in rows:
            del self._due[row]
            self._answered.discard(row)
            if (request := requests[row]) is not None:
                self.limits.check(row, request)
            elif self._conversations.needs_place(row):
                self._placed[self._host_of(row)] -= 1
        self._fill(clock)
        return {row: requests[row] for row in rows}

    @override
    def result(self, row: int) -> Completion | None:
        return self._conversations.result(row) if self._holds(row) else None

    def _holds(self, row: int) -> bool:
        return self._host_of(row) == self._here

    def _fill(self, clock: int) -> None:
        """Begin waiting rows, in order, as long as the next row's host has a place for it."""
        while self._waiting:
            row, places = self._waiting[0], self.limits.places
            host, needed = self._host_of(row), self._conversations.needs_place(row)
            if needed and places is not None and self._placed[host] >= places:
                break
            self._waiting.popleft()
            self._placed[host] += needed
            self._send(row, None, clock)

    def _send(self, row: int, turn: Completion | None, clock: int) -> None:
        self._due[row] = clock + self.limits.tool_steps
        if self._holds(row):
            self._owed.append((row, turn))

    def _at(self, clock: int) -> list[int]:
        """List the rows that are due, in ascending order. With 0 ``tool_steps`` a row is due once it has its answer."""
        if not self.as_answered:
            return sorted(row for row, due in self._due.items() if due <= clock)
        if (began := time.monotonic()) >= self._ask_at:  # asking hundreds of rows takes milliseconds
            self._answered = {row for row in self._due if self._conversations.ready(row)}
            ended = time.monotonic()
            self._ask_at = ended + max(_POLL_SECONDS, ended - began)
        return sorted(self._answered)

    def _exchange(
        self, partners: Hosts, clock: int, rows: Sequence[int], mine: Mapping[int, Request | None]
    ) -> dict[int, Request | None]:
        """Bring the requests of a wave to all hosts that drive the replica.

        A request is sent without the tokens that it shares with the row's past, which all hosts know.
        """
        digest = self._digest(clock, rows)
        short = {row: request and _without(request, self._pasts.get(row, ())) for row, request in mine.items()}
        answers: list[Wave] = partners.share("a wave of turns", (digest, short), Wave)
        found: dict[int, Request | None] = {}
        for _, requests in answers:
            for row, sent in requests.items():
                same, rest = sent or (0, None)
                past = self._pasts.get(row, ())[:same]
                found[row] = rest and replace(rest, token_ids=past + rest.token_ids)
        if len({digest for digest, _ in answers}) > 1 or sorted(found) != list(rows):
            listed = ", ".join(
                f"{digest[:12]} on host {host}" for host, (digest, _) in zip(partners.members, answers, strict=True)
            )
            raise LockstepError(
                f"hosts {', '.join(map(str, partners.members))} must have the same turns in the replica that they "
                f"share, got {listed} at clock {clock}; set hosts.check=step to find the first launch that differs"
            )
        return found

    def _digest(self, clock: int, rows: Sequence[int]) -> str:
        """Return the SHA-256 of a wave: its clock, its rows, and all tokens of these rows so far."""
        digest = hashlib.sha256(f"{clock} {list(rows)}".encode())
        for row in rows:
            digest.update(b"|" + np.asarray(self._pasts.get(row, ()), np.int32).tobytes())
        return digest.hexdigest()


def _without(request: Request, past: Sequence[int]) -> tuple[int, Request]:
    """Return the length of the prefix that a request shares with the row's past, and the request without the prefix."""
    ids = request.token_ids
    differing = (place for place, (a, b) in enumerate(zip(ids, past, strict=False)) if a != b)
    same = next(differing, min(len(ids), len(past)))
    return same, replace(request, token_ids=ids[same:])
