"""Answers as text: the same, or the same once normalised."""

from collections.abc import Sequence
from typing import Any


def missing(answer: Any) -> bool:
    """Whether a row has no answer to compare with."""
    return answer is None or (isinstance(answer, str) and not answer.strip())


def exact_answer(completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """1.0 where completion and answer are the same text, runs of white space counting as one space, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [None if missing(a) else float(c.split() == str(a).split()) for c, a in pairs]
