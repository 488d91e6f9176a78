"""The built-in tasks, for trying the whole loop without data or a model of your own.

Each task provides the data ``builtin:NAME``, and example conversations (lessons) to teach the built-in model NAME.
"""

from collections.abc import Mapping

from tpu_grpo.config.plugins import Shipped
from tpu_grpo.models.tasks.lessons import Task

TASKS: Mapping[str, Task] = Shipped(
    __name__,
    {
        "addition": "addition:TASK",
        "gemma_addition": "addition:TASK",
        "careful_addition": "addition:CAREFUL_TASK",
        "wordy_addition": "addition:WORDY_TASK",
        "calculator": "calculator_task:TASK",
        "guessing": "guessing_task:TASK",
    },
)
