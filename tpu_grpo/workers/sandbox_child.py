"""Runs in the sandbox: a program of the policy in one process, and in another the tests that judge it.

Both begin as copies of one interpreter that has read neither. The program's process holds only the program. The tests'
process asks it for names, calls and outputs (``sandbox_link.py``), compares, and alone can write results: the number of
each test that passed, or a script's output as JSON. This file imports nothing of tpu_grpo.
"""

import ast
import builtins
import ctypes
import io
import json
import os
import re
import resource
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress

from sandbox_link import FUNCTIONS, Link, ranked

TYPE_CHECKING = False  # typing's own takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_FORBIDDEN = re.compile(
    r"os\.(fork|exec|posix_spawn|spawn|startfile|system|kill|chown|chmod|link|symlink)|signal\.pthread_kill|"
    r"subprocess\.Popen|pty\.spawn|socket\.(?!gethostname|__new__)|ctypes\.(dlopen|dlsym|call_function)|"
    r"shutil\.chown|urllib\.Request"
)
"""Matches the beginnings of forbidden audit events."""
_LONGEST_ERROR = 300
_LONGEST_OUTPUT = 10**7
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move")


def main(seconds: str, memory_mb: str, file_mb: str) -> None:
    """Divide into the two processes; read the job from standard input, and do it."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: no process may read or change the memory of this one
    asked, answered = os.pipe(), os.pipe()
    judges = os.fork() != 0
    for descriptor in (asked[0], answered[1]) if judges else (asked[1], answered[0]):
        os.close(descriptor)
    job, results = (json.load(sys.stdin), os.dup(1)) if judges else ({}, -1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    _limit(float(seconds), int(memory_mb), int(file_mb))
    sys.addaudithook(_guard(os.path.realpath(os.getcwd())))
    sys.path.pop(0)  # this file's directory
    if not judges:
        _serve(asked[0], answered[1])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt in a test
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))  # its default action spares a namespace's first process
    link = Link(answered[0], asked[1], FUNCTIONS, judges=True)
    for result in _passed(link, **job) if "tests" in job else [json.dumps(link.ask("script", tuple(job.values())))]:
        os.write(results, f"{result}\n".encode())
    os._exit(0)


def _limit(seconds: float, memory_mb: int, file_mb: int) -> None:
    with suppress(OSError):  # not every kernel allows this; then only the audit hook blocks the network
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
    memory, size, time = memory_mb * 2**20, file_mb * 2**20, int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (time, time))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, seconds)  # its default action ends the process


def _guard(home: str) -> "Callable[[str, tuple[Any, ...]], None]":
    """Return an audit hook that refuses processes, network, libraries, and all files but ``home`` and Python's own."""
    readable = tuple({os.path.realpath(p) for p in (home, sys.prefix, sys.base_prefix, *sys.path) if p})
    readable += ("/dev/null", "/dev/urandom", "/usr/share/zoneinfo", "/etc/localtime")

    def inside(path: "Any", roots: tuple[str, ...]) -> bool:
        if isinstance(path, int):
            return True  # a descriptor that was opened before
        real = os.path.realpath(os.fsdecode(path))
        return any(real == root or real.startswith(f"{root}/") for root in roots)

    def guard(event: str, arguments: "tuple[Any, ...]") -> None:
        if event == "ctypes.dlopen" and arguments[0] is None:
            return  # importing ctypes, as numpy does
        if _FORBIDDEN.match(event):
            raise PermissionError(f"{event} is not allowed here")
        if event == "socket.__new__":
            raise PermissionError("there is no network here")
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            if not inside(path, (home, "/dev/null") if writes else readable):
                raise PermissionError(f"{path} is not to be opened here")
        if event in _CHANGES and not all(inside(a, (home,)) for a in arguments if isinstance(a, str | bytes)):
            raise PermissionError(f"{event} is not allowed outside the working directory")

    return guard


def _serve(reading: int, writing: int) -> None:
    """Do for a program what its tests ask."""
    space: dict[str, Any] = {"__name__": "program"}

    def load(program: str, imports: dict[str, str]) -> None:
        sys.stdin = io.StringIO()
        exec(compile(program, "<program>", "exec"), space)
        for name in {name for name in imports if name in program} - set(space):
            with suppress(ImportError):
                exec(imports[name], space)

    own = {"load": load, "name": space.__getitem__, "script": _script}
    Link(reading, writing, {**FUNCTIONS, **own}, judges=False).serve()


class _Names(dict):
    """The tests' global names; a name that the tests do not define is the program's.

    Python's own functions are the tests', unless these use no other undefined name, as ``assert sum(1, 2) == 3`` does.
    """

    def __init__(self, link: Link, nodes: list[ast.AST]) -> None:
        super().__init__(__name__="tests")
        names = [node for node in nodes if isinstance(node, ast.Name)]
        defined = {getattr(node, "name", None) or getattr(node, "arg", None) for node in nodes}
        defined |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
        own, used = set(dir(builtins)), {node.id for node in names} - defined
        self._link, self._own = link, own if used - own else set[str]()

    def __missing__(self, name: str) -> "Any":
        if name in self._own:
            raise KeyError(name)
        return ranked(self._link.ask("name", (name,)), 2 if name[:1].isupper() else 0)


def _passed(link: Link, program: str, tests: "list[Any]") -> "Iterator[int]":
    """Yield the numbers of the tests that pass.

    A text is code, which runs here with the program's names, after the program was loaded once. Any other test is an
    ``input`` that a run of the program as a script gets, and the ``output`` that it must print.
    """
    codes = [test for test in tests if isinstance(test, str)]
    nodes: list[ast.AST] = []
    for code in codes:
        with suppress(SyntaxError, ValueError):
            nodes += ast.walk(ast.parse(code))
    statements = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = {alias.asname or alias.name: ast.unparse(node) for node in statements for alias in node.names}
    names = _Names(link, nodes)
    loaded = bool(codes) and _succeeds(link, link.ask, "load", (program, imports))

    def check_output(test: "dict[str, Any]") -> None:
        printed = link.ask("script", (program, _LONGEST_OUTPUT, str(test["input"])))
        assert (printed["error"], _lines(printed["output"])) == (None, _lines(str(test["output"])))

    def check_code(test: str) -> None:
        exec(compile(test, "<test>", "exec"), names)

    for number, test in enumerate(tests):
        if isinstance(test, str):
            passes = loaded and _succeeds(link, check_code, test)
        else:
            passes = _succeeds(link, check_output, test)
        if passes:
            yield number


def _succeeds(link: Link, function: "Callable[..., Any]", *arguments: "Any") -> bool:
    try:
        function(*arguments)
    except BaseException:  # foreign code can raise anything, which is a failure
        return False
    return not link.lost


def _script(program: str, most_characters: int, given: str | None = None) -> dict[str, str | None]:
    """Return what a script prints, and the error that stopped it, if any. Without input, it is read as a notebook: what
    it prints includes errors, and the value of its last line."""
    written, error = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True), None
    sys.stdin = io.TextIOWrapper(io.BytesIO((given or "").encode(errors="replace")), "utf-8")
    space, notebook = {"__name__": "__main__"}, given is None
    try:
        tree = ast.parse(program, "<program>")
        last = tree.body.pop() if notebook and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with redirect_stdout(written), redirect_stderr(written if notebook else io.StringIO()):
            exec(compile(tree, "<program>", "exec"), space)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<program>", "eval"), space)
                if value is not None:
                    print(repr(value))
    except SystemExit as ending:
        error = None if ending.code in (None, 0) else f"SystemExit: {ending.code}"
    except BaseException as raised:  # foreign code can raise anything, which is reported
        error = _described(raised)
    text = written.buffer.getvalue().decode(errors="replace")
    return {"output": _shortened(text, most_characters), "error": error}


def _described(error: BaseException) -> str:
    """Describe in one line the program's exception, and the line of the program that raised it."""
    import traceback  # seldom needed, and slow to import

    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<program>"]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())[:_LONGEST_ERROR]
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return described if line is None else f"{described} (line {line})"


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


if __name__ == "__main__":
    main(*sys.argv[1:])
