"""Encodes the text of a conversation's turns as token ids, and cuts thinking out of token ids.

A tool may answer "<|im_end|>", and a web page may contain "<tool_call>". A tokenizer encodes these words as the tokens
that end a turn or begin a call. This file encodes them as plain text: `Encoder.guarded` inserts a character that no
text contains into such words, the template renders the message, and `Encoder.encode` removes the character.

If a chat template drops thinking from earlier turns, `Cutter` removes it from the token ids, without decoding them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Encoding, Tokenizer

from tpu_grpo.environments.actions import CUT

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerFast


BREAK = "\ufdd0"
"""The guard character, a noncharacter of Unicode that no text contains."""
_NO_TEXT = re.compile("[\ud800-\udfff\ufdd0]")


class Encoder:
    """Encodes rendered conversations.

    Markers are the added tokens that are special, or that the base vocabulary lacks, such as Qwen's ``<tool_call>``.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        self._tokenizer = tokenizer
        self._plain, markers = _without_markers(tokenizer)
        longest_first = sorted(markers.items(), key=lambda item: -len(item[1].content))
        self._ids = [number for number, _ in longest_first]
        self._markers = [token for _, token in longest_first]
        spaces = [(r"\s*" * token.lstrip, r"\s*" * token.rstrip) for token in self._markers]  # absorbed with it
        words = [re.escape(token.content) for token in self._markers]
        self._written = _pattern([before + word + after for word, (before, after) in zip(words, spaces, strict=True)])
        # the guard character cannot split a marker of one character
        self._words = [token.content for token in self._markers if len(token.content) > 1]
        self._spelled = _pattern([re.escape(word) for word in self._words])
        self.special = _pattern([re.escape(token.content) for token in self._markers if token.special])
        """Matches the special tokens in a text."""

    def guarded(self, text: str) -> str:
        """Insert the guard character into each word of a text that the tokenizer would encode as a marker."""
        text = _NO_TEXT.sub("\ufffd", text)
        while any(word in text for word in self._words):  # much faster than a search for the pattern
            text = self._spelled.sub(lambda word: word[0][0] + BREAK + word[0][1:], text)
        return text

    def released(self, text: str) -> str:
        """Remove the guard characters of `guarded` from a rendered text."""
        return text.replace(BREAK, "")

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text; guarded words become text, not markers."""
        if BREAK not in text:
            return self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return self.in_pieces(text)

    def in_pieces(self, text: str) -> list[int]:
        """Encode the markers in a text with their ids, and the text between them as plain text."""
        ids: list[int] = []
        at = 0
        for marker in self._written.finditer(text):
            ids += self.plain(text[at : marker.start()])
            assert marker.lastindex is not None
            ids.append(self._ids[marker.lastindex - 1])
            at = marker.end()
        return ids + self.plain(text[at:])

    def plain(self, text: str) -> list[int]:
        """Encode a text without markers: words that spell markers are encoded as plain text."""
        return self._plain.encode(self.released(text), add_special_tokens=False).ids

    def count(self, text: str) -> int:
        """Return the number of tokens of a text; words that spell markers count as plain text."""
        return len(self._encoding(text).ids)

    def shortened(self, text: str, tokens: int) -> str:
        """Cut the end of a text that has more than ``tokens`` tokens, and append CUT if there is room.

        The result has at most ``tokens`` tokens, CUT included.
        """
        encoding = self._encoding(text)
        if len(encoding.ids) <= tokens:
            return text
        for mark in (CUT, ""):
            for kept in range(tokens - self.count(mark), 0, -1):
                cut = text[: encoding.offsets[kept][0]] + mark  # drops whole characters
                if self.count(cut) <= tokens:  # a cut can change the last tokens
                    return cut
        return ""

    def _encoding(self, text: str) -> Encoding:
        return self._plain.encode(_NO_TEXT.sub("\ufffd", text), add_special_tokens=False)

    def spelled_by_accident(self) -> str | None:
        """Return a marker whose text ``plain`` encodes with the marker's id; None if there is none."""
        found = (
            token.content
            for token, number in zip(self._markers, self._ids, strict=True)
            if number in self.plain(token.content)
        )
        return next(found, None)


def _without_markers(tokenizer: "PreTrainedTokenizerFast") -> tuple[Tokenizer, Mapping[int, "AddedToken"]]:
    """Return a tokenizer that does not know the markers, and the markers by their ids."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"].get("vocab", {})
    own = set(vocabulary) if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    added = tokenizer.added_tokens_decoder
    markers = {n: token for n, token in added.items() if token.special or token.content not in own}
    contents = {token.content for token in markers.values()}
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in contents]
    state.update(post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(state)), markers


def _pattern(words: list[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the words, each as a group; without words it matches nothing."""
    return re.compile("|".join(f"({word})" for word in words) or r"(?!)")


OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Cutter:
    """Removes what templates drop from a turn: the tokens up to the last ``</think>``, and the newlines after that tag.

    A turn without ``</think>`` stays whole. Only tokens that consist of newlines are dropped as newlines. A token with
    newlines and other characters would stay; Qwen's vocabulary has none.
    """

    opened: tuple[int, ...]
    """The generation prompt's tokens from ``<think>`` to its end; empty if the policy itself writes ``<think>``."""
    close_id: int
    newline_ids: frozenset[int]
    """The tokens that consist of newlines only; empty for a template that keeps the newlines."""

    def cut(self, ids: Sequence[int], sampled: Sequence[bool]) -> list[int]:
        """Return a conversation's ids without the thinking of its sampled turns.

        Args:
            ids: [T], the whole sequence.
            sampled: [T], whether the policy sampled each token; a turn is an unbroken run of sampled tokens.
        """
        kept: list[int] = []
        at = 0  # the ids before this index are kept or dropped already
        for start, end in _runs(sampled):
            begin = start - len(self.opened)
            if begin < at or tuple(ids[begin:start]) != self.opened:
                begin = start
            kept += ids[at:begin]
            at = self._behind(ids, begin, end)  # begin for a turn without thinking, so ``opened`` stays
        return kept + list(ids[at:])

    def _behind(self, ids: Sequence[int], begin: int, end: int) -> int:
        """Return the index after a turn's thinking and dropped newlines; ``begin`` if the turn has no thinking."""
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
    """Return the tokens that consist of newlines only."""
    spelled = [n for token, n in tokenizer.get_vocab().items() if token == "<0x0A>" or not token.strip("\nĊ")]
    return frozenset(n for n in spelled if (text := tokenizer.decode([n])) and not text.strip("\n"))


def split_thinking(text: str) -> tuple[str, str]:
    """Split a turn into its thinking, which ends at the last ``</think>``, and its answer.

    A turn that begins with ``<think>`` and does not close it is thinking only.
    """
    if CLOSE in text:
        thought, _, said = text.rpartition(CLOSE)
        return thought.partition(OPEN)[2] if OPEN in thought else thought, said
    begun = text.lstrip()
    return (begun.removeprefix(OPEN), "") if begun.startswith(OPEN) else ("", text)
