"""Signals in every stage of a real run: answered, ended in time, with the code of the documentation, and continued."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.test_pipeline import digests

pytestmark = pytest.mark.slow  # whole runs; hosts/test_ending.py shows what a signal does without one

REPOSITORY = Path(__file__).parents[2]
SAFE_SECONDS = 10.0
REWARD = """
import os, time
from pathlib import Path

def length(completions, **kwargs):
    if Path(os.environ["HANGS"]).exists():
        time.sleep(120)
    return [float(len(text)) for text in completions]
"""


@contextmanager
def started(directory: Path, stage: str, workers: int, *, hangs: bool) -> Iterator[subprocess.Popen[str]]:
    """A run of four steps that has come to a stage; with ``hangs`` its reward does not answer from step 1 on."""
    (directory / "rewards.py").write_text(REWARD)
    switch, run_dir = directory / "hangs", directory / "run"
    switch.unlink(missing_ok=True)
    command = [sys.executable, "scripts/run.py", "configs/demo_cpu.yaml", f"run.dir={run_dir}", "run.max_steps=4"]
    command += ["checkpoint.resume=auto", "checkpoint.every=2", "evaluation.every=0"]
    command += [f"rewards=[{{name: '{directory}/rewards.py:length', workers: {workers}, timeout: 600}}]"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HANGS": str(switch), "XLA_FLAGS": ""}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment)
    try:
        if hangs:
            _await_stage(process, run_dir, "rollout of step 1")
            switch.touch()
        if stage:
            _await_stage(process, run_dir, stage)
        yield process
    finally:
        process.kill()
        process.communicate()


def _await_stage(process: subprocess.Popen[str], run_dir: Path, stage: str) -> None:
    log, end = run_dir / "logs" / "host_0.log", time.monotonic() + 280
    while not (log.exists() and f"{stage} begins" in log.read_text().rpartition("host 0 begins")[2]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def ended(process: subprocess.Popen[str], sent: float) -> tuple[int, str]:
    """Return the exit code and stderr of a process that must end in time."""
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - sent < SAFE_SECONDS
    assert "Traceback" not in errors
    return process.returncode, errors


@pytest.mark.parametrize(
    ("stage", "hangs", "workers", "after"),
    [
        ("rollout of step 3", False, 2, 2),
        ("rewards of step 1", True, 2, 0),
        ("rewards of step 1", True, 0, 0),
        ("update of step 3", False, 0, 3),
        ("saving step 2", False, 0, 2),
    ],
)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_run_stops_where_nothing_is_lost(
    tmp_path: Path, name: str, stage: str, hangs: bool, workers: int, after: int
) -> None:
    with started(tmp_path, stage, workers, hangs=hangs) as process:
        sent = time.monotonic()
        process.send_signal(getattr(signal, name))
        code, errors = ended(process, sent)
    assert code == 4
    assert f"{name}: the run stops as soon as nothing is lost" in errors
    said = f"stopped after step {after} as asked, which is saved" if after else "stopped before the first step was done"
    assert said in errors
    assert said in (tmp_path / "run" / "report.html").read_text()
    saved = tmp_path / "run" / "checkpoints"
    assert max([int(path.name) for path in saved.glob("*")], default=0) == after


def test_after_a_stop_and_a_second_signal_a_run_ends_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    with started(tmp_path / "whole", "", 0, hangs=False) as process:
        assert process.wait(timeout=280) == 0
    for stage, signals, code in (("rollout of step 2", 1, 4), ("update of step 3", 2, 1)):
        with started(tmp_path, stage, 0, hangs=False) as process:
            sent = 0.0
            for _ in range(signals):
                sent = time.monotonic()
                process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
            assert ended(process, sent)[0] == code
    with started(tmp_path, "", 0, hangs=False) as process:
        assert process.wait(timeout=280) == 0
    assert digests(tmp_path / "run") == digests(tmp_path / "whole" / "run")
