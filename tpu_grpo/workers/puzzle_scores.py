"""Scores answers to the puzzles of reasoning-gym with its verifiers, each in a forked process.

In 0.1.25 some verifiers raise for ordinary wrong answers (prime_factorization, boxnet), and some run the answer as
Python (n_queens, countdown): ``9**9**9`` never ends there, and exceptions of signals do not interrupt it.
"""

import contextlib
import os
import signal
import struct
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

SECONDS = 2.0
"""The processor time of an answer."""


def puzzle_score(answer: str, entry: Mapping[str, Any]) -> float | None:
    """Return the score of an answer to the puzzle ``entry`` {question, answer, metadata}; None if the verifier raises,
    takes longer than SECONDS or ends its process. Outside of the main thread, where it is not safe to fork, an answer
    can take for ever."""
    verifier = _verifier(entry["metadata"]["source_dataset"])
    if threading.current_thread() is threading.main_thread():
        return _forked(lambda: float(verifier(answer, entry)))
    with contextlib.suppress(Exception):  # verifiers raise many types
        return float(verifier(answer, entry))


@cache
def _verifier(name: str) -> Callable[[Any, Mapping[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn  # over a second to import

    found: Any = get_score_answer_fn(name)  # makes the task's dataset, which may read a file
    return found


def _forked(function: Callable[[], float]) -> float | None:
    """Return a function's result from a forked process, or None."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for number in (signal.SIGALRM, signal.SIGPROF):
                signal.signal(number, signal.SIG_DFL)  # ends the process
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(20)  # it may also wait for something
            os.write(writing, struct.pack("d", function()))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return struct.unpack("d", told)[0] if told else None
