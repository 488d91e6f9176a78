"""Thinking that a chat template drops from the past is cut out of the ids, which are never made again from text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Cutter:
    """A Cutter cuts out what templates drop: the turn up to its last ``</think>``, and the newlines after it.

    A turn without ``</think>`` stays whole. Newlines are dropped token by token, so that a token of newlines and other
    characters, which Qwen's vocabulary does not have, would stay.
    """

    opened: tuple[int, ...]
    """What the generation prompt writes from ``<think>`` on; empty if it leaves that to the policy."""
    close_id: int
    newline_ids: frozenset[int]
    """The tokens of nothing but newlines; empty for a template that keeps these."""

    def cut(self, ids: Sequence[int], sampled: Sequence[bool]) -> list[int]:
        """Return a conversation's ids without the thinking of its sampled turns.

        Args:
            ids: [T], the whole sequence.
            sampled: [T], whether the policy sampled each; a turn is an unbroken run of them.
        """
        kept: list[int] = []
        at = 0
        for start, end in _runs(sampled):
            begin = start - len(self.opened)
            if begin < at or tuple(ids[begin:start]) != self.opened:
                begin = start
            kept += ids[at:begin]
            at = self._behind(ids, begin, end)
        return kept + list(ids[at:])

    def _behind(self, ids: Sequence[int], begin: int, end: int) -> int:
        """Return the place after the thinking of a turn, or its beginning if there is none."""
        closed = [place for place in range(begin, end) if ids[place] == self.close_id]
        if not closed:
            return begin
        place = closed[-1] + 1
        while place < end and ids[place] in self.newline_ids:
            place += 1
        return place


def _runs(sampled: Sequence[bool]) -> list[tuple[int, int]]:
    """Return where each unbroken run of sampled tokens begins and ends."""
    marks = [False, *(bool(each) for each in sampled), False]
    starts = [n for n in range(len(sampled)) if marks[n + 1] and not marks[n]]
    ends = [n + 1 for n in range(len(sampled)) if marks[n + 1] and not marks[n + 2]]
    return list(zip(starts, ends, strict=True))


def newline_ids(tokenizer: "PreTrainedTokenizerFast") -> frozenset[int]:
    """Return the tokens of nothing but newlines."""
    spelled = [n for token, n in tokenizer.get_vocab().items() if token == "<0x0A>" or not token.strip("\nĊ")]
    return frozenset(n for n in spelled if (text := tokenizer.decode([n])) and not text.strip("\n"))


def split(text: str) -> tuple[str, str]:
    """Return what a turn thinks, and what it says: thinking ends at the last ``</think>``.

    A turn that begins with ``<think>`` and does not close it thinks to its end.
    """
    if CLOSE in text:
        thought, _, said = text.rpartition(CLOSE)
        return thought.partition(OPEN)[2] if OPEN in thought else thought, said
    begun = text.lstrip()
    return (begun.removeprefix(OPEN), "") if begun.startswith(OPEN) else ("", text)
