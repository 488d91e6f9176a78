"""A feed is the queue of a reward's batches: an executor answers the first batches while others are being sampled.

    feed = Feed(60.0, expected=3, answered=take)    # take(key, answer) is called once for every batch
    executor.serve(feed)                            # on a thread of its own; returns once the feed is over
    feed.add("a", batch)                            # on any thread
    feed.add("b", batch)
    feed.end()                                      # no more batches will come: the feed is over once all are answered

There are two time limits. A batch must be answered ``timeout`` seconds after a worker or thread gets it. All batches
must be answered ``rounds * timeout`` seconds after the executor notices the call of ``end(rounds)``.
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

from tpu_grpo.rewards.reward_call import Answer, Problem, RewardBatch, failed_answer


@dataclass(frozen=True)
class Task:
    """The work that a worker gets in one request: one batch, or several joined batches."""

    keys: tuple[Any, ...]
    sizes: tuple[int, ...]
    batch: RewardBatch
    until: float
    """The deadline, by the clock time.monotonic()."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Any, RewardBatch]], until: float) -> Self:
        """Join batches of one step."""
        keys, batches = zip(*parts, strict=True)
        columns = {name: [value for b in batches for value in b.columns[name]] for name in batches[0].columns}
        sizes = tuple(batch.size for batch in batches)
        return cls(keys, sizes, RewardBatch(columns, batches[0].step, sum(sizes)), until)

    def split(self, answer: Answer) -> list[Answer]:
        """Divide the answer to this task into answers to its batches.

        A problem of the whole task becomes a problem of each batch. The first batch gets all logged values.
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
    """The queue of one reward's batches; see the top of this file.

    Args:
        timeout: the seconds of the two time limits.
        expected: the expected number of batches, which limits how many workers are started.
        answered: is called with the key of each batch and its answer, on the thread that runs ``serve``.
        joins: whether waiting batches may be joined into one task, for async functions that await all rows together.
        weight: the part of a call that a batch counts for; after ``recycle`` calls, a worker is replaced.
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
        """The total time during which at least one batch was unanswered."""
        self.cancelled = False
        self._answered = answered
        self._joins = joins
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, RewardBatch]] = deque()
        self._unanswered: dict[Any, int] = {}
        self._done = 0
        self._rounds = 0
        """0 until ``end`` is called, then its argument ``rounds``."""
        self._deadline = math.inf
        self._busy_since = 0.0
        self._bell, self._button = os.pipe()
        self._rung = self._closed = False

    # --- for the code that adds batches ---

    def add(self, key: Any, batch: RewardBatch) -> None:
        """Add a batch under a key that no other batch has."""
        with self._lock:
            if not self._unanswered:
                self._busy_since = time.monotonic()
            self._unanswered[key] = batch.size
            self._waiting.append((key, batch))
        self.ring()

    def end(self, rounds: int = 1) -> None:
        """Mark that no more batches will come; the remaining batches have ``rounds`` times the timeout."""
        self._rounds = rounds
        self.ring()

    def cancel(self) -> None:
        """Mark that answers are no longer needed."""
        self.cancelled = True
        self.ring()

    def close(self) -> None:
        """Close the feed's pipe; no executor may serve the feed, now or later."""
        with self._lock:
            self._closed = True
            os.close(self._bell)
            os.close(self._button)

    # --- for the executor ---

    def ring(self) -> None:
        """Wake the thread that serves the feed, by making ``fileno`` readable."""
        with self._lock:
            if not self._rung and not self._closed:
                self._rung = True
                os.write(self._button, b"\0")

    def fileno(self) -> int:
        """Return the file descriptor that ``ring`` makes readable."""
        return self._bell

    def hush(self) -> None:
        """Empty the pipe after ``ring``, so that ``fileno`` is not readable until the next call of ``ring``."""
        with self._lock:
            self._rung = False
            os.read(self._bell, 1)

    def wait(self, seconds: float | None) -> None:
        """Wait for ``ring``, for at most ``seconds``; None waits without a limit."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if poll.poll(None if seconds is None else max(0.0, 1000 * seconds)):
            self.hush()

    @property
    def over(self) -> bool:
        """Whether all batches are answered and no more will come, or the feed is cancelled."""
        with self._lock:
            return self.cancelled or (self._rounds > 0 and not self._unanswered)

    @property
    def left(self) -> int:
        """Return the number of unanswered batches, including those that are expected to come."""
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
        """Take the next waiting batch, or with ``joins`` 1 / ``places`` of the waiting batches; None if none waits."""
        until = min(time.monotonic() + self.timeout, self.deadline)
        with self._lock:
            if not self._waiting:
                return None
            count = math.ceil(len(self._waiting) / places) if self._joins else 1
            parts = [self._waiting.popleft() for _ in range(count)]
        return Task.of(parts, until)

    def answer(self, task: Task, answer: Answer) -> None:
        """Split a task's answer among the batches of the task, and call ``answered`` for each batch."""
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
