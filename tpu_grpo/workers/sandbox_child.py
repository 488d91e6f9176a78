"""Runs in the sandbox's process: sets limits, runs the policy's program, and writes the passed tests or the output.

This file imports nothing of tpu_grpo. It writes ``<nonce> <number>`` after each test that passed, so that a program
that ends the process passes no further test. For a script it writes ``<nonce> <JSON>``.
"""

import ast
import io
import json
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

_FORBIDDEN = re.compile(
    r"os\.(fork|exec|posix_spawn|spawn|startfile|system|kill|chown|chmod|link|symlink)|signal\.pthread_kill|"
    r"subprocess\.Popen|pty\.spawn|socket\.(?!gethostname|__new__)|ctypes\.(dlopen|dlsym|call_function)|"
    r"shutil\.chown|urllib\.Request"
)
"""Matches the beginnings of forbidden audit events."""
_LONGEST_ERROR = 300
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move")


def main() -> None:
    """Read the job from standard input and do it."""
    job = json.load(sys.stdin)
    report = _reporter(job["nonce"])
    _limit(job["seconds"], job["memory_mb"], job["file_mb"])
    sys.stdin = io.StringIO()
    sys.addaudithook(_guard(os.path.realpath(os.getcwd())))
    if "tests" not in job:
        report(json.dumps(_script(job["program"], job["most_characters"])))
        return
    for number, passed in enumerate(_run(job["program"], job["tests"])):
        if passed:
            report(number)


def _reporter(nonce: str) -> Callable[[Any], None]:
    """Return a function that writes to the original standard output, and redirect all standard streams to /dev/null."""
    pipe = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    write = os.write  # the program may replace os.write

    def report(told: Any) -> None:
        write(pipe, f"{nonce} {told}\n".encode())

    return report


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


def _guard(home: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that refuses processes, network, libraries, and all files but ``home`` and Python's own."""
    readable = tuple({os.path.realpath(p) for p in (home, sys.prefix, sys.base_prefix, *sys.path) if p})
    readable += ("/dev/null", "/dev/urandom", "/usr/share/zoneinfo", "/etc/localtime")

    def inside(path: Any, roots: tuple[str, ...]) -> bool:
        if isinstance(path, int):
            return True  # a descriptor that was opened before
        real = os.path.realpath(os.fsdecode(path))
        return any(real == root or real.startswith(f"{root}/") for root in roots)

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
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


def _run(program: str, tests: list[Any]) -> Any:
    space: dict[str, Any] = {"__name__": "program"}
    ready = any(isinstance(test, str) for test in tests) and _passes(program, space)
    for test in tests:
        if isinstance(test, str):
            yield ready and _passes(test, space)
        else:
            yield _writes(program, str(test["input"]), str(test["output"]))


def _passes(code: str, space: dict[str, Any]) -> bool:
    try:
        with redirect_stdout(io.StringIO()):
            exec(compile(code, "<program>", "exec"), space)
    except BaseException:  # foreign code can raise anything, which is a failure
        return False
    return True


def _writes(program: str, given: str, expected: str) -> bool:
    """Return whether the program, run as a script, writes the expected text, ignoring white space at line ends."""
    written = io.StringIO()
    sys.stdin = io.StringIO(given)
    try:
        with redirect_stdout(written):
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as ending:
        if ending.code not in (None, 0):
            return False
    except BaseException:  # foreign code can raise anything, which is a failure
        return False
    return _lines(written.getvalue()) == _lines(expected)


def _script(program: str, most_characters: int) -> dict[str, str | None]:
    """Return what a script prints, including the value of its last line, and the error that stopped it, if any."""
    written, error, space = io.StringIO(), None, {"__name__": "__main__"}
    try:
        tree = ast.parse(program, "<program>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with redirect_stdout(written), redirect_stderr(written):
            exec(compile(tree, "<program>", "exec"), space)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<program>", "eval"), space)
                if value is not None:
                    print(repr(value))
    except SystemExit as ending:
        error = None if ending.code in (None, 0) else f"SystemExit: {ending.code}"
    except BaseException as raised:  # foreign code can raise anything, which is reported
        error = _described(raised)
    return {"output": _shortened(written.getvalue(), most_characters), "error": error}


def _described(error: BaseException) -> str:
    """Describe in one line the program's exception, and the line of the program that raised it."""
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
    main()
