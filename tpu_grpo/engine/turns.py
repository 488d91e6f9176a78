"""What the engine knows of conversations: the calls that it makes, and the rows whose environments are working.

A completion that is a conversation has several turns, each of which is a request. `TurnScheduler`
(tpu_grpo/environments/turn_scheduler.py) says when a row's next turn starts. For completions that are single answers,
`Turns` itself takes its place.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tpu_grpo.records.stages import Completion, Prompt, Request


class Conversations(Protocol):
    """The conversations of a batch of rows, as the engine sees them: the interface to their environments.

    A row's next request must not depend on other rows or on time. The methods are called on the thread that generates,
    and only by the host that holds the row's environment.

        conversations.begin(3)                  # starts the environment of row 3, without waiting
        conversations.ready(3)                  # False, then True
        conversations.next(3)                   # Request: its first turn
        conversations.ended(3, completion)      # the environment gets the turn, which has been sampled
        conversations.next(3)                   # Request of the next turn, or None: the conversation is over
        conversations.result(3)                 # the Completion of the whole conversation
    """

    @property
    def places(self) -> int | None:
        """How many conversations of each host may have an environment at once; None for any number."""
        ...

    def needs_place(self, row: int) -> bool:
        """Whether a row's conversation counts towards ``places``; every host knows this for every row."""
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
"""Opens the conversations of rows, given each row's prompt and the request that it would have without a conversation.
The request says how to sample the row; its ``max_new_tokens`` limits the whole conversation after the prompt."""


@dataclass(frozen=True)
class Limits:
    """The limits that an engine sets for conversations."""

    tool_steps: int
    """Decode steps after which a row is due."""
    places: int | None = None
    """How many conversations of each host may have an environment at once (None: any number). Further ones wait."""
    kept: int = 2**31
    """The most conversations to have open at once, including rows that are out: what the engine's cache can hold."""
    check: Callable[[int, Request], None] = lambda row, request: None
    """Raises RequestError if the engine can never serve the request of this row."""


class Turns:
    """The rows of one replica whose environments are working. Here, completions are single answers: there are none."""

    converses = False
    """Whether completions are conversations."""
    as_answered = False
    """Whether rows return once they are answered, and wait for no other row."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.sampled: Counter[int] = Counter()
        """The number of tokens in each row's ended turns."""

    def begin(self, rows: Sequence[int], clock: int) -> None:
        """Add the rows of a group that starts; the next ``tell`` starts their environments.

        Rows without a place begin, in order, when other conversations are over.
        """
        raise NotImplementedError

    def ended(self, row: int, request: Request, turn: Completion, clock: int) -> bool:
        """Note that a row's turn has ended; the next ``tell`` sends the turn to the row's environment. Returns whether
        this was the row's first turn."""
        raise NotImplementedError

    def tell(self) -> None:
        """Start new environments on this host, and send ended turns to environments, without waiting for answers."""

    @property
    def next_due(self) -> int | None:
        """The step at which the first row is due; None if no environment is working."""
        return None

    @property
    def out(self) -> list[int]:
        """The rows whose environments are working, and those that wait for a place."""
        return []

    @property
    def room(self) -> int:
        """The number of free places on the replica's hosts: those that no row has or waits for."""
        return 2**31

    @property
    def more_wait(self) -> bool:
        """Whether rows wait for a place."""
        return False

    def ready(self, clock: int) -> bool:
        """Whether every due row whose environment is on this host has its answer. With ``tool_steps`` 0: whether any
        row has its answer."""
        return True

    def take(self, clock: int) -> Mapping[int, Request | None]:
        """Wait for all rows that are due, and return their requests by row, ascending; None ends a conversation.

        Raises:
            LockstepError: if the hosts that drive the replica have different rows, or different tokens of a row.
            RequestError: if the engine can never serve one of the requests.
        """
        return {}

    def result(self, row: int) -> Completion | None:
        """Return the whole conversation of a row that is over; None on a host that does not hold it."""
        raise NotImplementedError
