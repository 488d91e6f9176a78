"""JSON and Countdown are labelled by hand, puzzles by reasoning-gym's answers; programs meet their tests and limits."""

import http.server
import inspect
import json
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym as gym
from reasoning_gym.factory import DATASETS

from tests.goldens import labelled
from tests.rewards.shipped.test_correctness import LABELLED
from tpu_grpo.environments.shipped.puzzles import Puzzle
from tpu_grpo.rewards.shipped.structured import countdown, json_schema, python_tests, reasoning_gym
from tpu_grpo.workers.puzzle_scores import _EVALUATED, is_code
from tpu_grpo.workers.sandbox import Limits, run_tests

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(("completion", "expected"), [*labelled(LABELLED, "json_schema"), ("[" * 100_000, 0.0)])
def test_json_schema(completion: str, expected: float):
    assert json_schema([completion], SCHEMA, parsed=0.2) == [expected]


def test_json_schemas_of_the_rows():
    schemas = [{"type": "string"}, json.dumps({"type": "number"}), None]
    assert json_schema(['"a"', '"a"', '"a"'], schemas) == [1.0, 0.0, None]
    with pytest.raises(ValueError, match="schema must be a JSON schema .*'x' is not valid"):
        json_schema([], {"type": "x"})
    assert json_schema(["<answer>1</answer>", "1"], {"type": "number"}, tag="answer") == [1.0, 0.0]


@pytest.mark.full
def test_values_that_a_validator_cannot_take_do_not_fit():
    nested = {"items": {"$ref": "#"}, "type": "array"}
    assert json_schema(["[" * 400 + "]" * 400], nested, parsed=0.2) == [0.2]
    started = time.perf_counter()
    assert json_schema([json.dumps("a" * 50 + "!")], {"pattern": "^(a|aa)+$"}, parsed=0.2) == [0.2]
    assert time.perf_counter() - started < 20.0


@pytest.mark.parametrize(("expression", "expected"), [*labelled(LABELLED, "countdown"), ("9" * 500, 0.0)])
def test_countdown(expression: str, expected: float):
    text = f"<think>hm</think><answer>{expression}</answer>"
    assert countdown([text], [309], [[6, 61, 94, 4]], format_score=0.1) == [expected]


def test_countdown_with_fewer_numbers_and_fractions():
    assert countdown(["8/3*3"], [8], [[8, 3, 3, 5]], tag=None, use_all=False) == [1.0]
    assert countdown(["8/3*3"], [8], [[8, 3, 3, 5]], tag=None) == [0.0]
    assert countdown(["8/(3-8/3)"], [24], [[8, 3, 8, 3]], tag=None) == [1.0]
    assert countdown(["1"], [None], [[1]], tag=None) == [None]
    assert countdown(["2*3", "2*3"], ["6", " "], ["[2, 3]", "[2, 3]"], tag=None) == [1.0, None]  # as a CSV has them


@pytest.mark.full
@pytest.mark.parametrize("name", ["chain_sum", "countdown", "leg_counting", "spell_backward", "simple_equations"])
def test_puzzles_of_reasoning_gym(name: str):
    entries: list[dict[str, Any]] = list(gym.create_dataset(name, size=4, seed=3))
    for entry in entries:
        right, said = str(entry["answer"]), f"<answer>{entry['answer']}</answer>"
        assert reasoning_gym(said, **entry) == 1.0
        wrong = reasoning_gym("<answer>no idea</answer>", **entry)
        assert wrong is not None
        assert wrong < 0.5
        assert reasoning_gym(right, **entry) == 0.0  # no tag
        assert reasoning_gym(right, **(entry | {"metadata": json.dumps(entry["metadata"])}), tag=None) == 1.0
        assert reasoning_gym(right, None, right) is None


@pytest.mark.full
@pytest.mark.parametrize(("name", "answer"), labelled(LABELLED, "unreadable_puzzle_answers"))
def test_an_answer_that_a_verifier_cannot_take_is_wrong(name: str, answer: str):
    entry, logged = dict(gym.create_dataset(name, size=1, seed=1)[0]), list[float]()
    log: Any = {"log_metric": lambda name, value: logged.append(value)}
    assert reasoning_gym(f"<answer>{answer}</answer>", **entry, **log) == 0.0
    assert reasoning_gym("<answer></answer>", **entry, **log) is not None
    assert logged[0] == 1.0


def test_a_thread_cannot_fork_and_asks_the_verifier_itself():
    entry, found = dict(gym.create_dataset("prime_factorization", size=1, seed=1)[0]), list[float | None]()
    answers = [entry["answer"], "five apples"]
    thread = threading.Thread(target=lambda: found.extend(reasoning_gym(a, **entry, tag=None) for a in answers))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


@pytest.mark.parametrize(
    "answer", ["{}", "[{}]", "[['Q'], {}]", "1 + {}", "sin({})", "(x for x in {})", "[{}", "1\n+ {}"]
)
def test_no_answer_to_a_puzzle_is_run(answer: str, tmp_path: Path):
    mark = tmp_path / "mark"
    calls = (
        f"open('{mark}', 'w')",
        f"__import__('os').mkdir('{mark}')",
        f"(open)('{mark}', 'w')",
        f"open#\n('{mark}', 'w')",
    )
    for name in sorted(_EVALUATED):
        entry: dict[str, Any] = gym.create_dataset(name, size=1, seed=3)[0]
        columns: Any = {key: entry[key] for key in ("metadata", "answer", "question")}
        scores = [reasoning_gym(f"<answer>{answer.format(call)}</answer>", **columns) for call in calls]
        assert scores == [0.0] * len(calls)
        puzzle = Puzzle()
        puzzle.reset(**entry)
        assert puzzle.step(f"<answer>{answer.format(calls[0])}</answer>")[1] == 0.0
    assert not mark.exists()


def test_right_answers_to_puzzles_that_are_evaluated_are_no_code():
    for name in sorted(_EVALUATED):
        entries: list[dict[str, Any]] = list(gym.create_dataset(name, size=3, seed=5))
        assert not any(is_code(name, str(entry["answer"])) for entry in entries)
    assert not is_code("spiral_matrix", "[3, 9, -5]")
    assert not is_code("string_insertion", "['A', 'B']")
    assert not is_code("intermediate_integration", "-x**2*cos(x) + sqrt(Abs(x + 1))/2 + atan(2.5*x) + C")


def test_the_puzzles_that_are_evaluated_are_known():
    evaluates = re.compile(r"(?:\beval|\bexec|(?:sympy|sp)\.parse_expr|(?<![.\w])parse_expr)\((?:user_)?answer")
    sources = {name: inspect.getsource(kind.score_answer) for name, (kind, *_) in DATASETS.items()}
    assert {name for name, source in sources.items() if evaluates.search(source)} == _EVALUATED


# --- programs --------------------------------------------------------------------------------------------------------

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
        (fence(ADD), [{"fn_name": "add", "input": "1\n2", "output": "3"}], 1.0),
        (fence(ADD), [{"fn_name": "add", "input": [1, 2], "output": 4}], 0.0),
        (fence("def f(x):\n    return x, 1"), [{"fn_name": "f", "input": [[0]], "output": [[0], 1]}], 1.0),
        (
            fence(f"class Solution:\n    {ADD}".replace("(a", "(self, a").replace("    return", "        return")),
            [{"fn_name": "add", "input": "1\n2", "output": "3"}],
            1.0,
        ),
        (fence("print(input())"), [{"fn_name": None, "input": "1", "output": "1"}], 1.0),
        (fence("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"), [{"input": "1", "output": "1"}], 1.0),
        (fence("class All:\n    __eq__ = lambda *_: True\nadd = lambda *_: All()"), ["assert add(1, 2) == 3"], 0.0),
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
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
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
    known = {"{victim}": str(victim), "{port}": str(server[0]), "{pid}": str(os.getpid())}
    code = FORBIDDEN[what]
    for name, value in known.items():
        code = code.replace(name, value)
    limits, started = Limits(seconds=1.0 if "too long" in what else 2.0, memory_mb=512), time.perf_counter()
    assert run_tests(code, ["pass"], limits) == [False]
    assert time.perf_counter() - started < 5.0
    assert victim.read_text() == "here"
    assert server[1] == []
    assert not Path("/tmp/tpu_grpo_climbed").exists()


def test_what_a_program_can_do(server: tuple[int, list[str]]):
    code = "import os, json, random, math\nwith open('x', 'w') as f: f.write('5')\nn = open('x').read()"
    assert run_tests(code, ["assert n == '5'", "os.remove('x')"], Limits()) == [True, True]
    assert run_tests("print(5)", ["pass"] * 3, Limits()) == [True] * 3
    with socket.create_connection(("127.0.0.1", server[0]), timeout=2):
        pass  # what the program was refused works from here


def test_a_program_does_not_see_our_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert run_tests("import os", ["assert 'OPENAI_API_KEY' not in os.environ"], Limits()) == [True]
