"""Programs pass their tests or fail, and cannot do what the sandbox forbids."""

import http.server
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.rewards.shipped.programs import python_tests
from tpu_grpo.workers.sandbox import Limits, run_tests

ADD = "def add(a, b):\n    return a + b\n"


def fence(code: str) -> str:
    return f"Here you are:\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("completion", "tests", "expected"),
    [
        (fence(ADD), ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"], 1.0),
        (fence(ADD), ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.0),
        (fence(ADD), "assert add(1, 2) == 3", 1.0),
        (fence(ADD), '["assert add(1, 2) == 3"]', 1.0),
        (fence("print(int(input()) + 1)"), [{"input": "4\n", "output": "5"}, {"input": "9", "output": "10\n"}], 1.0),
        (fence("print(int(input()) + 1)"), [{"input": "4", "output": "6"}], 0.0),
        (fence("import sys\nprint('a ')\nsys.exit()"), [{"input": "", "output": "a\n"}], 1.0),
        (fence("import numpy as np\nx = float(np.sum([1, 2]))"), ["assert x == 3"], 1.0),
        (fence("def add(a, b"), ["assert add(1, 2) == 3"], 0.0),
        (ADD, ["assert add(1, 2) == 3"], 0.0),
        ("", ["assert True"], 0.0),
        (fence(ADD), [], None),
        (fence(ADD), None, None),
    ],
)
def test_programs_with_tests(completion: str, tests: Any, expected: float | None):
    assert python_tests(completion, tests) == expected


def test_a_share_of_the_tests_and_programs_without_a_fence():
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]
    assert python_tests(fence(ADD), tests, partial=True) == 0.5
    assert python_tests(ADD, tests[:1], fence=False) == 1.0
    with pytest.raises(ValueError, match="tests must be Python code or mappings of input and output, got 5"):
        python_tests(fence(ADD), [5])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """The port of a web server on this machine, and the requests it got."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found.server_address[1], asked
        found.shutdown()


FORBIDDEN = {
    "ends early": "import os\nos._exit(0)",
    "too long": "while True: pass",
    "too long asleep": "import time\ntime.sleep(100)",
    "too long, deaf": "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(100)",
    "too much memory": "x = bytearray(2**31)",
    "forks": "import os\nos.fork()",
    "forks many": "import multiprocessing\np = multiprocessing.Process(target=print)\np.start()\np.join()",
    "starts programs": "import subprocess\nsubprocess.run(['true'])",
    "shell": "import os\nassert os.system('true') == 0",
    "big file": "with open('x', 'wb') as f: f.write(bytes(2**25))",
    "reads elsewhere": "open('/etc/passwd').read()",
    "reads elsewhere, low": "import os\nos.open('/etc/passwd', os.O_RDONLY)",
    "writes elsewhere": "open('{victim}', 'w').write('x')",
    "removes elsewhere": "import os\nos.remove('{victim}')",
    "renames from elsewhere": "import os\nos.rename('{victim}', 'x')",
    "climbs out": "import os\nos.chdir('/')\nopen('tmp/tpu_grpo_climbed', 'w')",
    "foreign library": "import ctypes\nctypes.CDLL('libc.so.6')",
    "network": "import socket\ns = socket.create_connection(('127.0.0.1', {port}), timeout=2)",
    "network, http": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}/', timeout=2)",
    "kills": "import os\nos.kill({pid}, 0)",
    "raises out": "raise BaseException",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_program_cannot_do(what: str, tmp_path: Path, server: tuple[int, list[str]]):
    victim = tmp_path / "victim"
    victim.write_text("here")
    code = "import os, json, random, math\nwith open('x', 'w') as f: f.write('5')\nn = open('x').read()"
    assert run_tests(code, ["assert n == '5'", "os.remove('x')"], Limits()) == [True, True]
    assert run_tests("print(5)", ["pass"] * 3, Limits()) == [True] * 3
    with socket.create_connection(("127.0.0.1", server[0]), timeout=2):
        pass  # what the program was refused works from here


def test_a_program_does_not_see_our_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert run_tests("import os", ["assert 'OPENAI_API_KEY' not in os.environ"], Limits()) == [True]
