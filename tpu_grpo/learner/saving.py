"""Saves checkpoints in the background, and tells all hosts at once when one of them cannot write.

Orbax 0.12.8 writes on threads of its own. After an error there it first waits for the other hosts at one barrier, while
they wait for this host at another, both for 20 minutes; and until then nobody sees the error.
"""

import logging
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import orbax.checkpoint as ocp

from tpu_grpo.hosts import end_all_hosts
from tpu_grpo.records.errors import DiskError, disk_error, disk_errors_explained

_NUMBER = re.compile(r"os_error_code='(\d+)'")
"""This is how TensorStore names an error of the system, in exceptions that are no OSError."""


class SavingManager(ocp.CheckpointManager):
    """Is Orbax's manager, with errors of the disk that say so and that the other hosts hear of."""

    _step: int | None = None
    """This step is being saved, or was last."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _leave_out_tracebacks()

    def save(self, step: int, *args: Any, **settings: Any) -> bool:
        """Start saving a step; as Orbax's.

        Raises:
            DiskError: the disk did not take this one, or the one before.
        """
        self.wait_until_finished()
        self._step = step
        with disk_errors_explained(self._explained):
            return super().save(step, *args, **settings)

    def wait_until_finished(self) -> None:
        """Wait for the step that is being saved; raises as ``save`` does."""
        with disk_errors_explained(self._explained):
            super().wait_until_finished()

    def _wait_for_checkpointers(self) -> None:
        """Wait for the threads that write: Orbax calls it on another thread, before it waits for the other hosts."""
        try:
            super()._wait_for_checkpointers()
        except Exception as error:
            end_all_hosts(self._explained(error) or error, f"step {self._step} could not be saved")
            raise

    def _explained(self, error: BaseException) -> DiskError | None:
        """Make an error that the disk has caused one that users are told in a line."""
        if isinstance(error, DiskError):
            return error
        if (number := _system_error(error)) is None:
            return None
        return disk_error(OSError(number, os.strerror(number), f"step {self._step} in {self.directory}"))


def _system_error(error: BaseException) -> int | None:
    """Return the number of the system's error that is the cause, if one is."""
    found = _NUMBER.search(str(error))
    return int(found[1]) if found else getattr(error, "errno", None)


def _leave_out_tracebacks() -> None:
    """Print no tracebacks for an error of the disk, which is raised as well, and told in a line.

    Orbax logs it where it meets it. After the first it closes an event loop to which TensorStore reports the end of
    every other array; each of these reports becomes an exception that nobody can catch.
    """
    logging.getLogger("absl").addFilter(_is_not_of_the_disk)
    before = sys.unraisablehook
    if getattr(before, "func", None) is _print_unless_of_a_closed_loop:
        return
    sys.unraisablehook = partial(_print_unless_of_a_closed_loop, before)


def _is_not_of_the_disk(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return error is None or _system_error(error) is None


def _print_unless_of_a_closed_loop(
    otherwise: "Callable[[sys.UnraisableHookArgs], object]", unraisable: "sys.UnraisableHookArgs"
) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        otherwise(unraisable)
