"""Calling the launcher, and waiting for what it started."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching.stand_in import StandIn
from tpu_grpo.cli.launch import main

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SMALL = ("--script", "scripts/program.py")


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def launch(capsys: pytest.CaptureFixture[str], verb: str, *words: str) -> tuple[int, str, str]:
    code = main([verb, "--how", "vm", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def started(stand_in: StandIn, worker: int, time: int = 0) -> dict:
    path = stand_in.home(worker) / f"started{time}"
    eventually(path.exists)
    eventually(lambda: path.read_text().endswith("}"))
    return json.loads(path.read_text())


def ended(stand_in: StandIn) -> None:
    eventually(lambda: all((stand_in.home(worker) / ".tpu_grpo/job/exit_code").exists() for worker in (0, 1)))
