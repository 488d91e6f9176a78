"""Rows of a batch whose answers are conversations: what the engine asks whoever holds the other side of them.

A row is in the engine while the policy has its turn, and outside while its environment works. What is here is called
on the thread that generates, and only by the host that holds the row's environment.

    conversations.begin(3)                  # the environment of row 3 is started; nothing is waited for
    conversations.ready(3)                  # False, then True
    conversations.next(3)                   # Request: its first turn
    conversations.ended(3, completion)      # the turn has been sampled; the environment gets it
    conversations.next(3)                   # Request of the next turn, or None: the conversation is over
    conversations.result(3)                 # the Completion of the whole conversation
"""

from collections.abc import Sequence
from typing import Protocol

from tpu_grpo.records.stages import Completion, Prompt, Request


class Conversations(Protocol):
    """The conversations of a batch of rows. What a row's next request is depends on no other row, and on no time."""

    @property
    def places(self) -> int | None:
        """How many conversations of each host may have an environment at once; None for any number."""
        ...

    def needs_place(self, row: int) -> bool:
        """Say whether a row's conversation counts among these, which every host knows of every row."""
        ...

    def begin(self, row: int) -> None:
        """Start the environment of a row, without waiting for it."""
        ...

    def ended(self, row: int, completion: Completion) -> None:
        """Give a turn to the row's environment, without waiting for its answer."""
        ...

    def ready(self, row: int) -> bool:
        """Say whether ``next`` has its answer already."""
        ...

    def next(self, row: int) -> Request | None:
        """Wait for the environment, and return the request of the row's next turn; None once there is none."""
        ...

    def result(self, row: int) -> Completion:
        """Return the whole conversation of a row that is over."""
        ...

    def close(self) -> None:
        """Give up conversations that are not over, and wait for nothing."""
        ...


class OpenConversations(Protocol):
    """Opens the conversations of a batch."""

    def __call__(self, prompts: Sequence[Prompt], requests: Sequence[Request]) -> Conversations:
        """Return the conversations of rows with these prompts, whose first requests would be these without any.

        A request says how the row is sampled; its ``max_new_tokens`` limits the whole conversation after the prompt.
        """
        ...
