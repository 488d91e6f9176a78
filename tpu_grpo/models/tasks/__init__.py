"""The built-in tasks, with which the whole loop can be tried without data or a model of one's own.

Each gives the data ``builtin:NAME``, and teaches the model of that name.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tpu_grpo.models.tasks import addition, calculator_task, guessing_task
from tpu_grpo.models.tasks.lessons import Task

TASKS: Mapping[str, Task] = MappingProxyType(
    {"addition": addition.TASK, "calculator": calculator_task.TASK, "guessing": guessing_task.TASK}
)
