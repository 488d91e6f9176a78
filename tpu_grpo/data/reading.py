"""Shows a bar on stderr while much data is read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from tpu_grpo.hosts.ending import here

MUCH = {"bytes": 20_000_000, "prompts": 20_000}
"""From so much on a bar is shown."""


@contextmanager
def reading(what: str, total: int, unit: Literal["bytes", "prompts"]) -> Iterator[Callable[[int], object]]:
    """Yield a function that is told how much of ``total`` is done; host 0 shows a bar where the total is large.

    The bar is one line that vanishes at its end; off a terminal there is none.
    """
    if total < MUCH[unit] or here.index != 0:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
