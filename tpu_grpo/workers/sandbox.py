"""Foreign Python is run here, in a process of its own, with limits on time, memory, files and network.

The process gets a temporary directory, no environment, and the limits of ``sandbox_child.py``: the kernel's on
processor time, memory, file size and open files, a network without interfaces where the kernel lets a user make one,
and Python's audit events for the rest. That stops accidents and what models try; it is no wall against somebody who
studies it. Run on a machine you can lose if your data may hold such code.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpu_grpo.workers.process import WORKER_MARK

_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True)
class Limits:
    """The limits say what a program may use."""

    seconds: float = 10.0
    """It bounds the wall-clock time, of tests for all of them together."""
    memory_mb: int = 1024
    file_mb: int = 16


@dataclass(frozen=True)
class Ran:
    """A Ran says what came of a program that was run as a script."""

    output: str
    """What it printed; the middle is left out of a longer text than was asked for."""
    error: str | None
    """Why it did not come to its end, in a line; None if it did."""


def run_tests(program: str, tests: Sequence[Any], limits: Limits) -> list[bool]:
    """Return for each of its tests whether a program passes it.

    A test is Python code that raises if the program is wrong, run in the program's namespace, or a mapping of
    ``input`` and ``output``: what the program reads and writes when it is run as a script.
    """
    passed = set(_told({"program": program, "tests": list(tests)}, limits))
    return [str(number) in passed for number in range(len(tests))]


def run_script(program: str, limits: Limits, most_characters: int) -> Ran:
    """Run a program as a script and return what it printed; as in a notebook, the value of its last line is, too.

    A program that takes too long or too much, or ends its process, has printed nothing.
    """
    told = _told({"program": program, "most_characters": most_characters}, limits)
    if not told:
        return Ran("", f"the program ended its process, or took more than {limits.seconds:g} s")
    return Ran(**json.loads(told[0]))


def _told(job: Mapping[str, Any], limits: Limits) -> list[str]:
    """Let the process of ``sandbox_child.py`` do a job; return what it tells, a line each."""
    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="sandbox_") as directory:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env=_environment(directory),
            start_new_session=True,
        )
        try:
            whole = json.dumps({"nonce": nonce, **job, **asdict(limits)})
            said, _ = child.communicate(whole.encode(), timeout=limits.seconds + 1.0)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            rest, _ = child.communicate()
    lines = (said or rest).decode(errors="replace").splitlines()
    return [line.removeprefix(f"{nonce} ") for line in lines if line.startswith(nonce)]


def _environment(home: str) -> dict[str, str]:
    """Make an environment of next to nothing, with the mark by which what a worker leaves behind is found."""
    kept = {name: os.environ[name] for name in (WORKER_MARK,) if name in os.environ}
    return {**kept, "PATH": os.defpath, "LANG": "C.UTF-8", "HOME": home, "OMP_NUM_THREADS": "1"}
