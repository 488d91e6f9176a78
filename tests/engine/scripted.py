"""Conversations whose other side is a script: tokens from a row's number, and delays that no token knows of."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tpu_grpo.records.stages import Completion, Request

Delay = Callable[[], float]
"""The seconds that an answer takes."""


def at_once() -> float:
    """Answer without delay."""
    return 0.0


@dataclass(frozen=True)
class Script:
    """What happens in a row's conversation, but for what the policy samples."""

    first: tuple[int, ...]
    """What is put behind the prompt."""
    turns: tuple[int, ...]
    """The most tokens of each turn."""
    answers: tuple[tuple[int, ...], ...]
    """What follows each turn but the last."""
    forgets: int | None = None
    """The turn before which the past is cut down to the prompt and the last turn."""


def script(row: int, prompt: int, longest: int = 8, tokens: tuple[int, int] = (2, 7)) -> Script:
    """A script of up to ``longest`` turns. Row 1 is over before its first turn, row 2 after it; row 3 has them all.

    Rows of one prompt have the same first observation. Every fourth row forgets its past before its third turn.
    """
    rng = np.random.default_rng(1000 + row)
    count = {1: 0, 2: 1, 3: longest}.get(row, int(rng.integers(1, longest + 1)))
    turns = tuple(int(n) for n in rng.integers(*tokens, count))
    answers = tuple(tuple(rng.integers(10, 120, int(rng.integers(1, 5))).tolist()) for _ in range(max(0, count - 1)))
    first = tuple(np.random.default_rng(prompt).integers(10, 120, 4).tolist())
    return Script(first, turns, answers, forgets=2 if row % 4 == 3 else None)


@dataclass
class Played:
    """A turn that an engine served."""

    row: int
    request: Request
    completion: Completion


@dataclass
class _Row:
    state: str = "new"
    at: float = 0.0
    """When its answer is there."""
    turn: int = 0
    past: tuple[int, ...] = ()
    request: Request | None = None
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class ScriptedConversations:
    """Plays scripts. It fails where the engine does not keep to the order of calls."""

    def __init__(
        self, requests: Sequence[Request], scripts: Sequence[Script], delay: Delay = at_once, places: int | None = None
    ):
        self.places = places
        self.unplaced: Script | None = None
        """A script whose rows need no place."""
        self.most_at_once = 0
        """How many conversations were begun and not over at once, at most."""
        self._requests = requests
        self._scripts = scripts
        self._delay = delay
        self._rows = [_Row() for _ in requests]
        self.played: list[Played] = []
        self.asked: list[int] = []
        """The rows of ``next``, in the order of the calls."""
        self.closed = False

    def needs_place(self, row: int) -> bool:
        return self._scripts[row] is not self.unplaced

    def begin(self, row: int) -> None:
        assert self._rows[row].state == "new"
        self._go_out(row)
        self.most_at_once = max(self.most_at_once, sum(one.state in ("in", "out") for one in self._rows))

    def ended(self, row: int, completion: Completion) -> None:
        state, script = self._rows[row], self._scripts[row]
        assert state.state == "in"
        assert state.request is not None
        self.played.append(Played(row, state.request, completion))
        self._add(row, completion.token_ids.tolist(), completion.logprobs.tolist())
        state.past = (*state.request.token_ids, *completion.token_ids.tolist())
        if state.turn < len(script.answers):
            answer = script.answers[state.turn]
            self._add(row, answer)
            if script.forgets == state.turn + 1:
                state.past = (*self._first(row), *completion.token_ids.tolist())
            state.past = (*state.past, *answer)
        state.turn += 1
        self._go_out(row)

    def ready(self, row: int) -> bool:
        assert self._rows[row].state == "out"
        return time.monotonic() >= self._rows[row].at

    def next(self, row: int) -> Request | None:
        state, script = self._rows[row], self._scripts[row]
        assert state.state == "out"
        self.asked.append(row)
        time.sleep(max(0.0, state.at - time.monotonic()))
        if state.turn == len(script.turns):
            state.state = "over"
            return None
        ids = self._first(row) if not state.turn else state.past
        sampling = replace(self._requests[row].sampling, max_new_tokens=script.turns[state.turn])
        state.state, state.request = "in", replace(self._requests[row], token_ids=ids, sampling=sampling)
        return state.request

    def result(self, row: int) -> Completion:
        state = self._rows[row]
        assert state.state == "over"
        return Completion(
            np.array(state.tokens, np.int32),
            np.array(state.logprobs, np.float32),
            "stop",
            0,
            sampled=np.array(state.sampled, np.bool_),
        )

    def close(self) -> None:
        self.closed = True

    def _first(self, row: int) -> tuple[int, ...]:
        return self._requests[row].token_ids + self._scripts[row].first

    def _add(self, row: int, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        state = self._rows[row]
        state.tokens += tokens
        state.sampled += [logprobs is not None] * len(tokens)
        state.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def _go_out(self, row: int) -> None:
        self._rows[row].state = "out"
        self._rows[row].at = time.monotonic() + self._delay()
