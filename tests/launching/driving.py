"""Calling the launcher, and waiting for what it started."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from tests.launching.stand_in import StandIn

REPOSITORY = Path(__file__).resolve().parent.parent.parent
Launch = Callable[..., tuple[int, str, str]]
SMALL = ("--script", "scripts/program.py")


def imported(told: str) -> set[str]:
    """The modules and packages of which ``python -X importtime`` told on stderr."""
    lines = [line for line in told.splitlines() if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in lines}
    return modules | {name.partition(".")[0] for name in modules}


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def started(stand_in: StandIn, worker: int, time: int = 0) -> dict:
    path = stand_in.home(worker) / f"started{time}"
    eventually(path.exists)
    eventually(lambda: path.read_text().endswith("}"))
    return json.loads(path.read_text())


def ended(stand_in: StandIn) -> None:
    eventually(lambda: all((stand_in.home(worker) / ".tpu_grpo/job/exit_code").exists() for worker in (0, 1)))
