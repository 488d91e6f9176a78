"""What an environment answers to a turn, cut so that its tokens are not too many.

With room for 9 tokens, answers of 2, 8 and 4 tokens have 2, 4 and 3 of them: a short one leaves what it does not need.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpu_grpo.environments.actions import Message

if TYPE_CHECKING:
    from tpu_grpo.environments.chat_dialect import Dialect


def cut_answers(messages: Sequence[Message], most: int, dialect: "Dialect") -> list[Message]:
    """Return the answers to a turn, the longest of them cut so that all have at most so many tokens together."""
    texts = [str(message["content"]) for message in messages]
    wanted = [dialect.count(text) for text in texts]
    return [
        message if room == tokens else {**message, "content": dialect.shortened(text, room)}
        for message, text, tokens, room in zip(messages, texts, wanted, shares(wanted, most), strict=True)
    ]


def shares(wanted: Sequence[int], most: int) -> list[int]:
    """Divide so many tokens among answers that want some: none gets more than it wants, or less than another cut one.

    What cannot be divided goes to the longest, and of answers that are as long to the last ones.
    """
    given, left = [0] * len(wanted), most
    shortest_first = sorted(range(len(wanted)), key=lambda n: (wanted[n], n))
    for place, n in enumerate(shortest_first):
        given[n] = min(wanted[n], left // (len(wanted) - place))
        left -= given[n]
    return given
