"""The built-in tasks, for trying the whole loop without data or a model of your own.

Each provides the data ``builtin:NAME``, and the lessons that teach the built-in model of the same name.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tpu_grpo.models.tasks import addition, calculator_task, guessing_task
from tpu_grpo.models.tasks.lessons import Task

TASKS: Mapping[str, Task] = MappingProxyType(
    {"addition": addition.TASK, "calculator": calculator_task.TASK, "guessing": guessing_task.TASK}
)
