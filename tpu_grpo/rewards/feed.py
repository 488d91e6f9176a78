"""A feed hands batches to an executor, which answers them while further ones are still to come.

    feed = Feed(60.0, expected=3, answered=take)    # take(key, answer) is called once for every batch
    executor.serve(feed)                            # on a thread of its own; returns once the feed is over
    feed.add("a", batch)                            # on any thread
    feed.add("b", batch)
    feed.end()                                      # no more: the feed is over when these are answered

Two limits hold. The executor may take ``timeout`` seconds for a batch from the moment at which a worker or thread
gets it. All batches must be answered within ``timeout`` seconds after the executor finds that no more will come.
"""

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from tpu_grpo.rewards.calling import Answer, Problem, RewardBatch, failed_answer


@dataclass(frozen=True)
class Task:
    """The work that a worker gets at once: one batch, or several joined ones."""

    keys: tuple[Any, ...]
    sizes: tuple[int, ...]
    batch: RewardBatch
    until: float
    """It is given up on at this value of time.monotonic()."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Any, RewardBatch]], until: float) -> Self:
        """Join batches of one step."""
        keys, batches = zip(*parts, strict=True)
        columns = {name: [value for b in batches for value in b.columns[name]] for name in batches[0].columns}
        sizes = tuple(batch.size for batch in batches)
        return cls(keys, sizes, RewardBatch(columns, batches[0].step, sum(sizes)), until)

    def split(self, answer: Answer) -> list[Answer]:
        """Divide an answer among the batches.

        A problem of the whole task is one of each batch. The first takes what was logged, which belongs to no row.
        """
        found, start = [], 0
        for size in self.sizes:
            rows, logged = slice(start, start + size), {} if start else answer.logged
            own = [
                replace(p, row=p.row - start)
                for p in answer.problems
                if p.row is not None and 0 <= p.row - start < size
            ]
            problems = [p for p in answer.problems if p.row is None] + own
            found.append(Answer(answer.values[rows], problems, logged, answer.of_tokens[rows]))
            start += size
        return found


class Feed:
    """Batches of one reward that come one by one; see the top of this file.

    Args:
        timeout: the seconds of both limits.
        expected: about how many batches will come, for the number of workers that are started.
        answered: is told the key of each batch and its answer, on the thread that serves.
        joins: whether batches that wait may be put together, as is good for functions that await all rows at once.
        weight: the share of a call, as ``recycle`` counts them, that a batch is.
    """

    def __init__(
        self,
        timeout: float,
        expected: int,
        answered: Callable[[Any, Answer], None],
        *,
        joins: bool = False,
        weight: float = 1.0,
    ) -> None:
        self.timeout = timeout
        self.expected = expected
        self.weight = weight
        self.seconds = 0.0
        """It adds up the time in which some batch was waiting for its answer."""
        self.cancelled = False
        self._answered = answered
        self._joins = joins
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, RewardBatch]] = deque()
        self._unanswered: dict[Any, int] = {}
        self._done = 0
        self._rounds = 0
        """No more batches will come once it is 1 or more; the second limit is this many times the timeout."""
        self._deadline = math.inf
        self._busy_since = 0.0
        self._bell, self._button = os.pipe()
        self._rung = self._closed = False

    # --- whoever has batches ---

    def add(self, key: Any, batch: RewardBatch) -> None:
        """Add a batch under a key that no other batch has."""
        with self._lock:
            if not self._unanswered:
                self._busy_since = time.monotonic()
            self._unanswered[key] = batch.size
            self._waiting.append((key, batch))
        self.ring()

    def end(self, rounds: int = 1) -> None:
        """Mark that no more batches will come; the time for the remaining ones is ``rounds`` times the timeout."""
        self._rounds = rounds
        self.ring()

    def cancel(self) -> None:
        """Mark that answers are no longer needed."""
        self.cancelled = True
        self.ring()

    def close(self) -> None:
        """Free the feed; no executor may serve it any more."""
        with self._lock:
            self._closed = True
            os.close(self._bell)
            os.close(self._button)

    # --- the executor ---

    def ring(self) -> None:
        """Wake the thread that serves."""
        with self._lock:
            if not self._rung and not self._closed:
                self._rung = True
                os.write(self._button, b"\0")

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the feed has news."""
        return self._bell

    def hush(self) -> None:
        """Take note that the feed rang."""
        with self._lock:
            self._rung = False
            os.read(self._bell, 1)

    def wait(self, seconds: float | None) -> None:
        """Wait at most this many seconds until the feed has news."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if poll.poll(None if seconds is None else max(0.0, 1000 * seconds)):
            self.hush()

    @property
    def over(self) -> bool:
        """Whether no batch is left to answer, and none will come."""
        with self._lock:
            return self.cancelled or (self._rounds > 0 and not self._unanswered)

    @property
    def left(self) -> int:
        """Return the number of batches that are not answered yet, as far as it is known."""
        with self._lock:
            still_to_come = 0 if self._rounds else self.expected - self._done
            return max(len(self._unanswered), still_to_come)

    @property
    def deadline(self) -> float:
        """Return the time.monotonic() by which all batches must be answered; infinity as long as more may come."""
        if self._rounds and self._deadline == math.inf:
            self._deadline = time.monotonic() + self._rounds * self.timeout
        return self._deadline

    def take(self, places: int = 1) -> Task | None:
        """Take the next batch, or the first of ``places`` shares of the waiting ones if they may be joined."""
        until = min(time.monotonic() + self.timeout, self.deadline)
        with self._lock:
            if not self._waiting:
                return None
            count = math.ceil(len(self._waiting) / places) if self._joins else 1
            parts = [self._waiting.popleft() for _ in range(count)]
        return Task.of(parts, until)

    def answer(self, task: Task, answer: Answer) -> None:
        """Pass on a worker's answer, or the problem that it had."""
        for key, part in zip(task.keys, task.split(answer), strict=True):
            self._settle(key, part)

    def answer_all(self, problem: Problem) -> None:
        """Answer all unanswered batches with a problem."""
        with self._lock:
            self._waiting.clear()
            unanswered = dict(self._unanswered)
        for key, size in unanswered.items():
            self._settle(key, failed_answer(size, problem))

    def _settle(self, key: Any, answer: Answer) -> None:
        with self._lock:
            del self._unanswered[key]
            self._done += 1
            if not self._unanswered:
                self.seconds += time.monotonic() - self._busy_since
        self._answered(key, answer)
