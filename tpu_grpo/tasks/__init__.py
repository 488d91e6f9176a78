"""Holds the built-in tasks, with which the whole loop can be tried without data or a model of one's own.

Each gives the data ``builtin:NAME``, and teaches the model of that name.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tpu_grpo.tasks import addition, calculator, guessing, puzzles, python, search
from tpu_grpo.tasks.task import Task

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "addition": addition.TASK,
        "calculator": calculator.TASK,
        "search": search.TASK,
        "python": python.TASK,
        "puzzles": puzzles.TASK,
        "guessing": guessing.TASK,
    }
)
