"""The wall around programs of the policy: what gets out of Python is still inside, and a machine without walls says so.
What a program does to what judges it does not help it.

Programs leave Python by ``_posixsubprocess``, which raises no audit event, and go on in a shell.
"""

import errno
import os
import socket
import sys
from pathlib import Path

import pytest

from tests.workers.programs import programs
from tpu_grpo.workers import sandbox
from tpu_grpo.workers.sandbox import Limits, run_script, run_tests

LIMITS = Limits(10.0)
ESCAPE = """
import _posixsubprocess, os, sys, time
_posixsubprocess.fork_exec(
    ["/bin/sh", "-c", {shell!r}], [b"/bin/sh"], True, (), None, [b"PATH=/usr/bin"],
    -1, -1, -1, -1, -1, -1, *os.pipe(), False, False, -1, None, None, None, -1, None, False
)
while not os.path.exists("told.txt"):
    time.sleep(0.01)
print(open("told.txt").read().strip())
"""


def told(shell: str) -> str:
    """What a shell outside of Python, started by a program in the sandbox, tells."""
    ran = run_script(ESCAPE.format(shell=f"({shell}) >told 2>&1; echo $? >>told; mv told told.txt"), LIMITS, 5000)
    assert ran.error is None, ran
    return ran.output.strip()


@pytest.fixture
def no_wall(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Bubblewrap as it is where the kernel refuses namespaces."""
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(sandbox, "bwrap_path", lambda: program)
    sandbox._bubblewrap.cache_clear()
    yield
    sandbox._bubblewrap.cache_clear()


def test_what_leaves_python_sees_no_file_of_the_machine_and_changes_none(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("a secret")
    assert told(f"cat {secret}").endswith("No such file or directory\n1")
    assert told(f"echo changed > {secret}").endswith("\n2")  # there is no such directory
    assert secret.read_text() == "a secret"
    assert "etc/passwd: No such file" in told("cat /etc/passwd")
    assert "Read-only file system" in told(f"echo x > {sys.prefix}/changed")
    assert told("ls -A") == "told\n0"


def test_what_leaves_python_sees_no_process_no_network_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    assert "a secret" not in told("env")
    assert told(f"kill -0 {os.getpid()}").endswith("\n1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.0)
        code = f"{sys.executable} -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}))'"
        assert "ConnectionRefusedError" in told(code) or "Network is unreachable" in told(code)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_what_a_program_writes_is_bounded(tmp_path: Path) -> None:
    code = "for number in range(100): open(str(number), 'wb').write(bytes(2**19))"
    ran = run_script(code, Limits(10.0, file_mb=1), 1000)
    assert ran.error == "OSError: [Errno 28] No space left on device (line 1)"


def test_a_machine_without_walls_says_so_and_what_python_refuses_is_refused(
    no_wall: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_script("print(1)", LIMITS, 100).output == "1\n"
    assert run_tests("x = 1", ["assert x == 1", "assert x == 2"], LIMITS) == [True, False]
    error = capfd.readouterr().err
    assert error.startswith(
        "programs of the policy run without a wall, as bubblewrap cannot make one here: bwrap: No permissions to "
        "create new namespace. They can read and change what this user can"
    )
    assert error.count("\n") == 1
    for code in ("open('/etc/passwd')", "import os; os.system('true')", "import socket; socket.socket()"):
        assert (run_script(code, LIMITS, 100).error or "").startswith("PermissionError: ")


CHEATS = programs("cheats.txt")
"""Programs that give a wrong answer, and tests that each find it."""


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_cannot_pass_by_changing_what_judges_it(cheat: str) -> None:
    program, tests = CHEATS[cheat]
    assert run_tests(program, tests, Limits(3.0)) == [False] * len(tests)


def test_what_leaves_python_can_neither_read_nor_change_the_tests_memory() -> None:
    code = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); "
        "print([(libc.ptrace(16, process, 0, 0), ctypes.get_errno()) for process in (1, 2)])"
    )
    assert told(f"{sys.executable} -c '{code}'") == f"[(-1, {errno.EPERM}), (-1, {errno.EPERM})]\n0"
