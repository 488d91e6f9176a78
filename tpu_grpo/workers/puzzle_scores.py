"""Scores answers to the puzzles of reasoning-gym with its verifiers, each in a forked process.

In 0.1.25 some verifiers raise for ordinary wrong answers (prime_factorization, boxnet), and some run the answer as
Python (n_queens, countdown): ``9**9**9`` never ends there, and exceptions of signals do not interrupt it. So these are
given no code.
"""

import contextlib
import os
import re
import signal
import struct
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

SECONDS = 2.0
"""The processor time of an answer."""
_EVALUATED = {"binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"}
_EVALUATED |= {"puzzle24", "simple_integration", "spiral_matrix", "string_insertion"}
_FUNCTION = re.compile(r"\b(?:a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|[aA]bs|Integral)\s*\(")
_CODE = re.compile(r"[^\w\s+*/^().,!'\"\[\]-]|[a-zA-Z_]\w*\s*\(|[\])'\"]\s*\(|\.\s*[a-zA-Z_]", re.ASCII)
"""Matches another sign, a call, or an attribute."""


def puzzle_score(answer: str, entry: Mapping[str, Any]) -> float | None:
    """Return the score of an answer to the puzzle ``entry`` {question, answer, metadata}; None if the verifier raises,
    takes longer than SECONDS, ends its process or would run the answer. Outside of the main thread, where it is not
    safe to fork, an answer can take for ever."""
    puzzle = entry["metadata"]["source_dataset"]
    if is_code(puzzle, answer):
        return None
    verifier = _verifier(puzzle)
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


def is_code(puzzle: str, answer: str) -> bool:
    """Return whether the verifier of a puzzle would run an answer that is more than numbers, lists and functions."""
    return puzzle in _EVALUATED and _CODE.search(_FUNCTION.sub("(", answer)) is not None
