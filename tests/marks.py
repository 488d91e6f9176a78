"""Tests find the processes of users' code that they have started themselves, and no others of the machine."""

import os
import time

import psutil

from tpu_grpo.workers.process import WORKER_MARK, environment_of

os.environ["TESTED_BY"] = TESTER = os.environ.get("TESTED_BY", str(os.getpid()))
"""What these tests start inherits this, and nothing that others start at the same time."""


def marked() -> set[int]:
    """The processes of users' code that these tests have started and are alive."""
    found = set()
    for process in psutil.process_iter():
        try:
            variables = environment_of(process)
            if WORKER_MARK in variables and variables.get("TESTED_BY") == TESTER:
                found.add(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def left_after(before: set[int], seconds: float) -> set[int]:
    """The processes that are new since ``before`` and do not end within so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := marked() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
