"""The wall around programs of the policy: what gets out of Python is still inside, and a machine without walls says so.
What a program does to what judges it does not help it.

Programs leave Python by ``_posixsubprocess``, which raises no audit event, and go on in a shell.
"""

import errno
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

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
    sandbox._bubblewrap.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield
    sandbox._bubblewrap.cache_clear()  # pyright: ignore[reportPrivateUsage]


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


FORGE = """
import os, json, sys, builtins
def send(*messages):
    for fd in range(3, 30):
        for m in messages:
            try: os.write(fd, m if isinstance(m, bytes) else json.dumps(m).encode() + b"\\n")
            except OSError: pass
"""
CHEATS: dict[str, tuple[str, list[Any]]] = {
    "builtins replaced": (
        """
import builtins
builtins.abs = lambda x: 0
builtins.all = builtins.any = lambda x: True
def f(x): return 9
""",
        ["assert abs(f(1) - 5) < 1e-6", "assert all(f(i) == i for i in range(3))"],
    ),
    "defines abs": (
        """
def abs(x): return 0
def f(x): return 9
""",
        ["assert abs(f(1) - 5) < 1e-6"],
    ),
    "list of tests edited by frames": (
        """
import sys
frame = sys._getframe()
while frame:
    for v in list(frame.f_locals.values()):
        if isinstance(v, list): v[:] = ['pass'] * len(v)
    frame = frame.f_back
def f(x): return 9
""",
        ["assert f(1) == 1", "assert f(1) == 1"],
    ),
    "list found by gc": (
        """
import gc
for o in gc.get_objects():
    if type(o) is list and o and all(isinstance(x, str) for x in o) and 'assert' in o[0]: o[:] = ['pass']*len(o)
def f(x): return 9
""",
        ["assert f(1) == 1", "assert f(1) == 1"],
    ),
    "equals all": (
        """
class E:
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    __hash__ = lambda s: 0
def f(x): return E()
""",
        ["assert f(1) == 1", "assert not f(1) != 1", "assert 1 == f(1)", "assert f(1) in [1,2]"],
    ),
    "sums and orders as wanted": (
        """
class E:
    def __sub__(self, o): return 0.0
    __rsub__ = __sub__
    def __lt__(self, o): return True
    __gt__=__le__=__ge__=__contains__=__lt__
def f(x): return E()
""",
        ["assert abs(f(1) - 0.5) < 1e-6", "assert 1 < f(1) < 2", "assert 3 in f(1)", "assert abs(0.5 - f(1)) < 1e-6"],
    ),
    "int subclass": (
        """
class I(int):
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    __hash__ = int.__hash__
def f(x): return I(9)
""",
        ["assert f(1) == 1"],
    ),
    "str subclass": (
        """
class S(str):
    def __eq__(self, o): return True
    __hash__ = str.__hash__
def f(x): return S('9')
""",
        ["assert f(1) == '1'"],
    ),
    "list subclass": (
        """
class L(list):
    def __eq__(self, o): return True
def f(x): return L()
""",
        ["assert f(1) == [1]"],
    ),
    "exit 0": (
        """
import os
def f(x): os._exit(0)
""",
        ["assert f(1) == 1"],
    ),
    "sys exit": (
        """
import sys
def f(x): sys.exit(0)
""",
        ["assert f(1) == 1"],
    ),
    "atexit": (
        """
import atexit, os
atexit.register(os.write, 1, b'0\\n1\\n')
def f(x): return 9
""",
        ["assert f(1) == 1"],
    ),
    "assertion error patched": (
        """
import builtins
class A(Exception):
    pass
builtins.AssertionError = A
import unittest
unittest.TestCase.assertEqual = lambda *a, **k: None
def f(x): return 9
""",
        [
            "assert f(1) == 1",
            """
import unittest
unittest.TestCase().assertEqual(f(1), 1)
""",
        ],
    ),
    "math patched": (
        """
import math
math.isclose = lambda *a, **k: True
def f(x): return 9
""",
        [
            """
import math
assert math.isclose(f(1), 1)
""",
            "assert math.isclose(f(1), 1)",
        ],
    ),
    "fake result": (
        """
import os
for fd in range(3, 20):
    for text in (b'0\\n', b'1\\n', b'0 0\\n'):
        try: os.write(fd, text)
        except OSError: pass
print(0)
def f(x): return 9
""",
        ["assert f(1) == 1"],
    ),
    "secrets of the frames": (
        """
import sys, os
frame = sys._getframe()
found = []
while frame:
    for v in list(frame.f_locals.values()):
        if isinstance(v, dict) and 'nonce' in v: found.append(v['nonce'])
    frame = frame.f_back
for n in found:
    for fd in range(3, 20):
        try: os.write(fd, (n + ' 0\\n').encode())
        except OSError: pass
def f(x): return 9
""",
        ["assert f(1) == 1"],
    ),
    "raises StopIteration": ("def f(x): raise StopIteration", ["assert all(map(lambda c: f(c) == c, [1, 2]))"]),
    "expected output read": (
        """
import sys
print([v for v in sys._getframe(3).f_locals.values()])
expected = None
frame = sys._getframe()
while frame:
    for v in list(frame.f_locals.values()):
        if isinstance(v, list) and v and isinstance(v[0], dict): expected = v[0]['output']
    frame = frame.f_back
print(expected)
""",
        [{"input": "1", "output": "2"}],
    ),
    "text that equals all": (
        """
import sys, builtins
class T(str):
    def __eq__(s, o): return True
    def splitlines(s): return T()
    def rstrip(s): return s
class O:
    def write(s, x): pass
    def getvalue(s): return T()
sys.stdout = O()
""",
        [{"input": "1", "output": "2"}],
    ),
    "skips a unittest": (
        """
import unittest
def f(x): raise unittest.SkipTest('x')
""",
        [
            """
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(1), 2)
r = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))
assert r.wasSuccessful()
"""
        ],
    ),
    "exit suppresses": (
        """
class C:
    def __enter__(self): return self
    def __exit__(self, *a): return True
""",
        [
            """
with C() as c:
    assert c is None
"""
        ],
    ),
    "swallowed loss": (
        """
import os
def f(x): os._exit(0)
""",
        [
            """
try:
    f(1)
except BaseException:
    pass
""",
            "pass",
        ],
    ),
    "forged answers": (
        FORGE
        + """
def f(x):
    send(['give', 1, {}, ''], ['give', 1, {'0': 1}, ''], ['raise', [1, 2, 3], {}, ''], ['x'], ['give'])
    send(['give', ['class', 'builtins', 'eval', None], {}, ''])
    send(['ask', 'call', {'z': ['yours', 1], '0': ['module', 'os']}])
    send(['ask', 'getattr', {'0': ['module', 'os'], '1': 'environ'}])
    return 9
""",
        ["assert f(1) == 2", "assert f(1) == 3"],
    ),
    "forged at load": (
        FORGE
        + """
send(*([['give', 3, {}, '']] * 50))
def f(x): return 9
""",
        ["assert f(1) == 2", "assert f(3)(3) == 2"],
    ),
    "recursive list": (
        """
def f(x):
    a = []
    a.append(a)
    return a
""",
        ["assert f(1) == 2"],
    ),
    "gigabytes": ("def f(x): return 'a' * 10**8", ["assert f(1) == 2"]),
    "float at will": (
        """
n = 0
class F(float):
    def __le__(s, o): return True
    __ge__ = __lt__ = __gt__ = __le__
    def __sub__(s, o): return 0.0
def f(x): return F(7.0)
""",
        ["assert 3 <= f(1) <= 4", "assert abs(f(1) - 3.5) < 0.1"],
    ),
    "frames of callback": (
        """
def f(g):
    try: return g.__globals__
    except AttributeError: pass
    try: return g.gi_frame.f_globals
    except AttributeError: return 9
""",
        ["assert f(lambda: 1) == 2", "assert 9 != f(i for i in [1])"],
    ),
    "patch class of tests": (
        """
def f(o):
    c = o.kind
    c.check = lambda *a: True
    return 9
""",
        [
            """
class K:
    def check(self, v): return v == 1
o = K()
o.kind = K
try:
    v = f(o)
except AttributeError:
    v = 9
assert o.check(v)
"""
        ],
    ),
    "main patched": (
        """
import __main__, sys
__main__._lines = lambda t: 1
__main__._passes = lambda *a: True
sys.modules['sandbox_link'].plain = lambda v: 2
def f(x): return 9
""",
        ["assert f(1) == 2", {"input": "", "output": "5"}],
    ),
}

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
