"""Conversations in the engine: the rows whose environments are working, and the waves in which these rows return.

A row is out from the end of a turn on, and from the start of its group on. It is due ``tool_steps`` decode steps later,
by the engine's clock. At the first launch boundary at which rows are due, all of them come back together, in ascending
order; the engine waits for answers that are not there yet. So what is admitted when is a function of the requests and
their tokens, and of no time. For ``tool_steps`` 16 and launches of 16 steps:

    clock   0    16                   32                   48
            rows 3 and 5 end a turn   a launch of others   3 and 5 are due: one wave, in which 3 is first

Environments may have a limited number of places. Then a row begins when another conversation is over, however long the
environments take, and no environment is asked for more at once than it has places for.

A replica over several hosts has its environments where its groups are told: each host brings the requests of its own
rows to the others, in one exchange a wave, and all see that they speak of the same rows with the same pasts.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.records.stages import Completion, Prompt, Request

Wave = tuple[str, dict[int, tuple[int, Request] | None]]
"""What hosts tell each other in JSON: the digest of a wave, and by row how many tokens its request has in common with
its past, and the request without them; None for a conversation that is over."""


class Conversations(Protocol):
    """The conversations of a batch of rows, as the engine sees them: the interface to their environments.

    A row's next request depends on no other row and on no time. The methods are called on the thread that generates,
    and only by the host that holds the row's environment.

        conversations.begin(3)                  # the environment of row 3 is started; nothing is waited for
        conversations.ready(3)                  # False, then True
        conversations.next(3)                   # Request: its first turn
        conversations.ended(3, completion)      # the turn has been sampled; the environment gets it
        conversations.next(3)                   # Request of the next turn, or None: the conversation is over
        conversations.result(3)                 # the Completion of the whole conversation
    """

    @property
    def places(self) -> int | None:
        """How many conversations of each host may have an environment at once; None for any number."""
        ...

    def needs_place(self, row: int) -> bool:
        """Whether a row's conversation counts towards ``places``; every host knows this of every row."""
        ...

    def begin(self, row: int) -> None:
        """Start the environment of a row, without waiting for it."""
        ...

    def ended(self, row: int, completion: Completion) -> None:
        """Send a turn to the row's environment, without waiting for its answer."""
        ...

    def ready(self, row: int) -> bool:
        """Whether ``next`` would return without waiting."""
        ...

    def next(self, row: int) -> Request | None:
        """Wait for the environment, and return the request of the row's next turn; None if the conversation is over."""
        ...

    def result(self, row: int) -> Completion:
        """Return the whole conversation of a row that is over."""
        ...

    def close(self) -> None:
        """Discard conversations that are not over, without waiting."""
        ...


OpenConversations = Callable[[Sequence[Prompt], Sequence[Request]], Conversations]
"""Opens the conversations of rows with these prompts, whose first requests would be these without any. A request says
how the row is sampled; its ``max_new_tokens`` limits the whole conversation after the prompt."""


@dataclass(frozen=True)
class Limits:
    """What an engine lets conversations do."""

    tool_steps: int
    """Decode steps after which a row is due."""
    places: int | None = None
    """How many conversations of each host may have an environment at once; the next begin once others are over."""
    kept: int = 2**31
    """How many conversations to have at once, those that are out among them: those that its cache can keep."""
    check: Callable[[int, Request], None] = lambda row, request: None
    """Raises RequestError if the engine can never serve a request, which has this index."""


class Waves:
    """The rows of one replica whose environments are working. All hosts that drive the replica must make the same
    calls."""

    def __init__(
        self,
        conversations: Conversations | None,
        limits: Limits,
        *,
        host_of: Callable[[int], int] = lambda row: 0,
        here: int = 0,
        partners: Hosts | None = None,
    ):
        """Nothing is out yet.

        Args:
            conversations: those of the whole batch, of which this host asks for its own rows; None if answers are no
                conversations, so that no row is ever out.
            limits: those of the replica's engine.
            host_of: the host that has the environment of a row.
            here: this host.
            partners: the hosts that drive the replica, if they are several.
        """
        self.converses = conversations is not None
        """Whether answers are conversations."""
        if conversations is not None:
            self._conversations = conversations
        self.limits = limits
        self._host_of, self._here = host_of, here
        self._partners = partners
        self._waiting: deque[int] = deque()
        self._placed: Counter[int] = Counter()
        """How many conversations have an environment on each host."""
        self._due: dict[int, int] = {}
        self._pasts: dict[int, tuple[int, ...]] = {}
        self._sampled: dict[int, int] = {}
        self._owed: list[tuple[int, Completion | None]] = []
        self._given_up = False

    def begin(self, rows: Sequence[int], clock: int) -> None:
        """Take in the rows of a group that is started; ``tell`` starts their environments.

        Rows without a place begin, in order, when other conversations are over.
        """
        self._waiting.extend(rows)
        self._fill(clock)

    def ended(self, row: int, request: Request, turn: Completion, clock: int) -> bool:
        """Take in a row whose turn has ended; ``tell`` sends the turn to the environment. Returns whether it was the
        row's first turn."""
        first = row not in self._pasts
        self._sampled[row] = self.sampled(row) + len(turn.token_ids)
        self._pasts[row] = (*request.token_ids, *turn.token_ids.tolist())
        self._send(row, turn, clock)
        return first

    def tell(self) -> None:
        """Send this host's environments their new starts and turns, without waiting for answers."""
        owed, self._owed = self._owed, []
        for row, turn in owed:
            if turn is None:
                self._conversations.begin(row)
            else:
                self._conversations.ended(row, turn)

    @property
    def next_due(self) -> int | None:
        """The step at which the first row is due; None if no environment is working."""
        return min(self._due.values(), default=None)

    @property
    def out(self) -> list[int]:
        """The rows whose environments are working, and those that wait for a place."""
        return [*self._due, *self._waiting]

    @property
    def room(self) -> int:
        """The number of free places; for a replica over several hosts, on all of them together."""
        if self.limits.places is None:
            return 2**31
        hosts = 1 if self._partners is None else len(self._partners.members)
        return hosts * self.limits.places - self._placed.total() - len(self._waiting)

    @property
    def more_wait(self) -> bool:
        """Whether rows wait for a place."""
        return bool(self._waiting)

    def sampled(self, row: int) -> int:
        """Return the number of tokens in a row's ended turns."""
        return self._sampled.get(row, 0)

    def ready(self, clock: int) -> bool:
        """Whether every row that is due has its answer; for a replica over several hosts, every such row of this
        host."""
        return all(self._conversations.ready(row) for row in self._at(clock) if self._holds(row))

    def take(self, clock: int) -> dict[int, Request | None]:
        """Wait for all rows that are due, and return their requests in ascending order; None ends a conversation.

        Raises:
            LockstepError: if hosts that drive the replica together have other rows, or other tokens of them.
            RequestError: if the engine can never serve one of the requests.
        """
        rows = self._at(clock)
        requests = {row: self._conversations.next(row) for row in rows if self._holds(row)}
        if self._partners is not None:
            requests = self._exchange(self._partners, clock, rows, requests)
        for row in rows:
            del self._due[row]
            if (request := requests[row]) is not None:
                self.limits.check(row, request)
            elif self._conversations.needs_place(row):
                self._placed[self._host_of(row)] -= 1
        self._fill(clock)
        return {row: requests[row] for row in rows}

    def result(self, row: int) -> Completion | None:
        """Return the whole conversation of a row that is over; None on a host that does not hold it."""
        return self._conversations.result(row) if self._holds(row) else None

    def give_up(self) -> None:
        """Return no row from now on, not even those whose turns end later."""
        self._given_up = True
        self._waiting.clear()
        self._due.clear()
        self._owed.clear()

    def _holds(self, row: int) -> bool:
        return self._host_of(row) == self._here

    def _fill(self, clock: int) -> None:
        """Begin rows, in their order, while the host of the next one has a place for it."""
        while self._waiting:
            row, places = self._waiting[0], self.limits.places
            host, needed = self._host_of(row), self._conversations.needs_place(row)
            if needed and places is not None and self._placed[host] >= places:
                break
            self._waiting.popleft()
            self._placed[host] += needed
            self._send(row, None, clock)

    def _send(self, row: int, turn: Completion | None, clock: int) -> None:
        if self._given_up:
            return
        self._due[row] = clock + self.limits.tool_steps
        if self._holds(row):
            self._owed.append((row, turn))

    def _at(self, clock: int) -> list[int]:
        """List the rows that are due, in ascending order."""
        return sorted(row for row, due in self._due.items() if due <= clock)

    def _exchange(
        self, partners: Hosts, clock: int, rows: Sequence[int], mine: Mapping[int, Request | None]
    ) -> dict[int, Request | None]:
        """Bring the requests of a wave to all hosts that drive the replica.

        A request goes without the tokens that it has in common with the row's past, which all of them know.
        """
        digest = self._digest(clock, rows)
        short = {row: request and _without(request, self._pasts.get(row, ())) for row, request in mine.items()}
        answers: list[Wave] = partners.share("a wave of turns", (digest, short), Wave)
        found: dict[int, Request | None] = {}
        for _, requests in answers:
            for row, sent in requests.items():
                found[row] = sent and _with(*sent, self._pasts.get(row, ()))
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
        """Return the sha256 of a wave: when it is, its rows, and all tokens that they have so far."""
        digest = hashlib.sha256(f"{clock} {list(rows)}".encode())
        for row in rows:
            digest.update(b"|" + np.asarray(self._pasts.get(row, ()), np.int32).tobytes())
        return digest.hexdigest()


def _without(request: Request, past: Sequence[int]) -> tuple[int, Request]:
    """Return how many tokens a request has in common with the row's past, and the request without them."""
    ids = request.token_ids
    differing = (place for place, (a, b) in enumerate(zip(ids, past, strict=False)) if a != b)
    same = next(differing, min(len(ids), len(past)))
    return same, replace(request, token_ids=ids[same:])


def _with(same: int, request: Request, past: tuple[int, ...]) -> Request:
    return replace(request, token_ids=past[:same] + request.token_ids)
