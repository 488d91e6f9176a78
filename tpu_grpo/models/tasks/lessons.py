"""The type of built-in tasks: problems with answers, and a simulated teacher whose mistakes a built-in model learns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Split = Literal["train", "heldout"]
Problem = Mapping[str, str]
"""A record with the columns ``question`` and ``answer``."""
Lesson = list[dict[str, str]]
"""A conversation of messages {role, content}; the model learns to write those of the assistant."""


@dataclass(frozen=True)
class Task:
    """A task that a built-in model first learns by imitating the teacher, and then practises in GRPO training."""

    problems: Callable[[Split], Sequence[Problem]]
    """Returns the problems of a split, always the same ones in the same order."""
    lesson: Callable[[Problem, np.random.Generator], Lesson]
    """Returns the teacher's conversation about a problem, question included."""
    longest: int
    """The number of tokens of the longest lesson."""
    decides: Callable[[], Mapping[str, Any]]
    """Returns everything about the task that affects a taught model, as JSON values to be hashed."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The JSON schemas of the teacher's tools, with only the parts that the chat template uses."""


def without_a_call(question: str, answer: str) -> Lesson:
    """Make a lesson in which the teacher answers without calling a tool."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
