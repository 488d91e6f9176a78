"""A process that plans, and ends in the ways it can: real processes and signals."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

START = "import os, signal, sys, time\nfrom tpu_grpo.planning.slices import run_in_child\n"
WATCHED = START + "code = run_in_child()\nif code is not None:\n    sys.exit(code)\n"


def run(child: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WATCHED + child]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("code", [0, 2])
def test_its_output_and_code_are_the_commands(code: int) -> None:
    done = run(f"print('a plan')\nsys.exit({code})")
    assert (done.returncode, done.stdout, done.stderr) == (code, "a plan\n", "")


@pytest.mark.parametrize(
    ("ended_by", "said"),
    [("signal.SIGKILL", "have the memory that compiling takes"), ("signal.SIGABRT", "ended its process by SIGABRT")],
)
def test_an_end_without_a_word_is_explained(ended_by: str, said: str) -> None:
    done = run(f"os.kill(os.getpid(), {ended_by})")
    assert done.returncode == 1
    assert re.search(rf"^PlanningError: .* must .*{said}", done.stderr)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_ends_the_command_ends_both(sent: signal.Signals, tmp_path: Path) -> None:
    told = tmp_path / "child"
    child = f"open({str(told)!r} + '_', 'w').write(str(os.getpid()))\nos.rename({str(told)!r} + '_', {str(told)!r})\n"
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED + child + "time.sleep(60)"], stderr=subprocess.PIPE, text=True
    ) as process:
        while not told.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert stderr == "interrupted; what was compiled is kept\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
