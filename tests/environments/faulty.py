"""This environment does what environments should not, where its column says."""

import contextlib
import ctypes
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import time
from typing import Any, NoReturn


def raises() -> Any:
    raise KeyError("nothing there")


def hangs() -> NoReturn:
    while True:
        pass


def resists() -> Any:
    """In C, without giving up the interpreter's lock, and with every signal blocked that can be."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(1000)


def leaves() -> Any:
    os._exit(3)


def exits() -> Any:
    sys.exit("enough")


def crashes() -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(1000)


def eats() -> Any:
    return len(bytearray(2**34))


def gives_an_object() -> Any:
    return object()


def gives_much() -> Any:
    return "x" * 100_000_000


def gives_bytes() -> Any:
    return b"bytes"


def closes_everything() -> Any:
    os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return "closed"


def kills_its_parent() -> Any:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def writes_into_connections() -> Any:
    for descriptor in range(3, 200):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff" * 100)
    time.sleep(1000)


def forges_an_answer() -> Any:
    data = pickle.dumps("done")
    for descriptor in range(3, 200):
        with contextlib.suppress(OSError):
            os.write(descriptor, struct.pack("!i", len(data)) + data)
    time.sleep(1000)


class Later:
    def __await__(self) -> Any:
        yield


def returns_an_awaitable() -> Any:
    return Later()


def fills_its_output() -> Any:
    sys.stdin.read()
    sys.stdout.write("")
    return "done"


def closes_its_output() -> Any:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    for descriptor in range(3):
        os.close(descriptor)
    return "closed"


def forks() -> Any:
    """Leave a child, a grandchild with a session of its own, and a program behind."""
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(1000)
        os._exit(0)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return "forked"


def forks_and_hangs() -> Any:
    forks()
    hangs()


def doubles() -> Any:
    """Return in two processes."""
    os.fork()
    return "doubled"


def not_a_number() -> Any:
    return float("nan")


def gives_text() -> Any:
    return "1"


class Faulty:
    """``fault`` names a function of this file, which runs in the method ``where``."""

    def reset(self, fault: str = "", where: str = "", **columns: Any) -> Any:
        self.fault, self.where = fault, where
        return self._do("reset", "begin")

    def work(self, text: str) -> Any:
        """Do some work.

        Args:
            text: What is to be done.
        """
        return self._do("work", f"did {text}")

    def get_reward(self) -> Any:
        return self._do("get_reward", 1.0)

    def close(self) -> None:
        self._do("close", None)

    def _do(self, here: str, otherwise: Any) -> Any:
        return globals()[self.fault]() if self.where == here else otherwise


class FailsToBegin(Faulty):
    def __init__(self) -> None:
        raises()


class FailsToBeginSteps:
    def __init__(self) -> None:
        raises()

    def reset(self) -> None: ...

    def step(self, action: str) -> Any: ...


class Silent(Faulty):
    """Its file ends the process when the main process is not the one that imports it."""


class SilentAsync:
    """The same on an event loop."""

    async def reset(self) -> str:
        return "begin"

    async def work(self) -> str:
        """Do some work."""
        return "did"


if os.environ.get("FAULTY_IMPORT") == "leaves" and "tpu_grpo.environments.pool" not in sys.modules:
    os._exit(7)
if os.environ.get("FAULTY_IMPORT") == "hangs" and "tpu_grpo.environments.pool" not in sys.modules:
    time.sleep(1000)
if os.environ.get("FAULTY_IMPORT") == "raises" and "tpu_grpo.environments.pool" not in sys.modules:
    raise OSError("no such thing here")
