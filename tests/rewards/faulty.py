"""These rewards do what rewards should not."""

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any


def good(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


def prints(completions: list[str]) -> list[float]:
    for completion in completions:
        print(completion, flush=True)
        print(completion, file=sys.stderr, flush=True)
    return good(completions)


def raises(completions: list[str]) -> list[float]:
    raise KeyError("nothing there")


def sleeps(completions: list[str]) -> list[float]:
    time.sleep(1000)
    return []


def hangs(completions: list[str]) -> list[float]:
    """Without giving up the interpreter's lock."""
    re.match("(a+)+$", "a" * 60 + "b")
    return []


def not_a_number(completions: list[str]) -> list[float]:
    return [float("nan")] * len(completions)


def infinite(completions: list[str]) -> list[float]:
    return [float("inf")] * len(completions)


def too_few(completions: list[str]) -> list[float]:
    return [1.0]


def strings(completions: list[str]) -> Any:
    return ["1"] * len(completions)


def leaves(completions: list[str]) -> list[float]:
    os._exit(3)


def exits(completions: list[str]) -> list[float]:
    sys.exit("enough")


def crashes(completions: list[str]) -> list[float]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def eats(completions: list[str]) -> list[float]:
    return [float(len(bytearray(2**34)))] * len(completions)


def forks(completions: list[str]) -> list[float]:
    """Leaves a child, a grandchild with a session of its own, and a program behind."""
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
        time.sleep(1000)
    subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
    return [1.0] * len(completions)


def doubles(completions: list[str]) -> list[float]:
    """Returns in two processes."""
    os.fork()
    return [1.0] * len(completions)


def inspects(completions: list[str], log_metric: Any) -> list[float]:
    """Tells about its process."""
    log_metric("jax", float("jax" in sys.modules))
    found = [n for n in os.environ if n.startswith(("TPU_", "XLA_", "LIBTPU")) and not n.startswith("TPU_GRPO_")]
    log_metric("variables", float(len(found)))
    log_metric("cpu", float(os.environ["JAX_PLATFORMS"] == "cpu"))
    return [float(os.getpid())] * len(completions)


def naps(completions: list[str]) -> list[float]:
    time.sleep(0.5)
    return [0.0] * len(completions)


def late(completions: list[str], step: int) -> list[float]:
    """Hangs in its second batch only."""
    if step == 2:
        time.sleep(1000)
    return [float(step)] * len(completions)
