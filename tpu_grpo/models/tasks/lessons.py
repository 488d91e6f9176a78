"""A task has problems with answers, and a teacher with bad habits, from whom the built-in model of its name learns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Split = Literal["train", "heldout"]
Problem = Mapping[str, str]
"""A record with the columns ``question`` and ``answer``."""
Lesson = list[dict[str, str]]
"""A conversation, as messages {role, content}, of which the assistant's are learned as they are written."""


@dataclass(frozen=True)
class Task:
    """A Task is what a built-in model is taught on, and then trained on."""

    problems: Callable[[Split], Sequence[Problem]]
    """It returns the problems of a split, always the same ones in the same order."""
    lesson: Callable[[Problem, np.random.Generator], Lesson]
    """It returns the conversation that the teacher has about a problem, question included."""
    longest: int
    """The tokens of the longest lesson."""
    decides: Callable[[], Mapping[str, Any]]
    """It returns what of the task decides a taught model, to be digested: JSON."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The JSON schemas of the tools that the teacher knows, as far as a chat template writes them."""


def without_a_call(question: str, answer: str) -> Lesson:
    """Make the lesson of a teacher who answers at once."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
