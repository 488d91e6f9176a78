"""Several real processes on this machine, each running a few lines as one host."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROLOGUE = """
import os, signal, sys, threading, time
from tpu_grpo.records.errors import TpuGrpoError
from tpu_grpo.hosts import Hosts, Watch, start

coordinator, count, index, name = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def main(hosts):
{body}

try:
    main(start(coordinator, count, index, run=name, timeout_seconds={timeout}))
except TpuGrpoError as error:
    print(f"{{type(error).__name__}}: {{error}}", file=sys.stderr)
    sys.exit(error.exit_code)
"""
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Ended:
    code: int
    out: str
    errors: str
    at: float
    """Seconds since all were started."""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def running(
    body: str, counts: Mapping[int, int], *, timeout: float, address: str | None = None, name: str = "a run"
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a host for each of ``counts``, told that there are so many of them, which runs the body."""
    script = PROLOGUE.format(body=textwrap.indent(textwrap.dedent(body), "    "), timeout=timeout)
    address = address or f"127.0.0.1:{free_port()}"
    ours = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": ""}
    environment = {**os.environ, **ours}
    started: list[subprocess.Popen[str]] = []
    try:
        for index, count in counts.items():
            command = [sys.executable, "-u", "-c", script, address, str(count), str(index), name]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.communicate()


def run(
    body: str,
    count: int,
    *,
    only: Sequence[int] | None = None,
    stuck: Sequence[int] = (),
    counts: Mapping[int, int] | None = None,
    timeout: float = 30.0,
    address: str | None = None,
    name: str = "a run",
) -> dict[int, Ended]:
    """How each host ended; ``stuck`` ones are not awaited, only ended, and ``counts`` are hosts told another count."""
    indices = range(count) if only is None else only
    told = {**dict.fromkeys(indices, count), **(counts or {})}
    began = time.monotonic()
    ended: dict[int, Ended] = {}
    with running(body, told, timeout=timeout, address=address, name=name) as processes:
        waiting = {index: process for index, process in zip(indices, processes, strict=True) if index not in stuck}
        while waiting and time.monotonic() - began < 60:
            for index, process in list(waiting.items()):
                if process.poll() is not None:
                    out, errors = process.communicate()
                    ended[index] = Ended(process.returncode, out, errors, time.monotonic() - began)
                    del waiting[index]
            time.sleep(0.05)
        assert not waiting, f"hosts {sorted(waiting)} still run; the others: {ended}"
    return ended
