"""Users' code that does something it should not; `tests.several.faults` runs it in workers."""

import asyncio
import ctypes
import gc
import itertools
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOREVER = 1000
DAEMON = "86399"
"""The seconds for which programs that are left behind sleep; they are found by this number on their command line."""


class Unforeseen(BaseException):
    """An exception that no ``except Exception`` catches."""


class Nasty:
    """A value whose methods raise."""

    def __init__(self, method: str):
        self._method = method

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError(f"no {self._method}")

    __len__ = __float__ = __repr__ = __str__ = __iter__ = __getitem__ = __eq__ = _raise
    __hash__ = None


def _sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            continue
    return found


def _write(data: bytes) -> None:
    """Write data into each socket of this process, including its channel to the main process."""
    for descriptor in _sockets():
        with socket.socket(fileno=os.dup(descriptor)) as end:
            end.setblocking(True)
            end.settimeout(5.0)
            try:
                end.sendall(data)
            except OSError:
                continue


def _framed(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


def _daemons(count: int) -> None:
    for _ in range(count):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sleep", ["sleep", DAEMON], {})
            os._exit(0)
    subprocess.Popen(["sleep", DAEMON], start_new_session=True, env={})


def _eat() -> None:
    held = []
    while True:
        held.append(bytearray(2**26))


def _recurse() -> None:
    _recurse()


def _overflow() -> None:
    sys.setrecursionlimit(2**30)
    _recurse()


def _spin() -> None:
    while True:
        pass


def _threads() -> None:
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(FOREVER,)).start()


def _resist() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(FOREVER)


def _raise(error: BaseException) -> None:
    raise error


def _at_exit() -> None:
    import atexit

    atexit.register(time.sleep, FOREVER)


def _print(draw: random.Random) -> None:
    for descriptor in (1, 2):
        os.write(descriptor, draw.randbytes(2**16) + b"\x1b[2J\x00\r")
    print("\ud800 half a line", end="")


def _kill_server() -> None:
    if "fork_server" in Path(f"/proc/{os.getppid()}/cmdline").read_text():
        os.kill(os.getppid(), signal.SIGKILL)


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _lose_modules() -> None:
    for name in [*sys.modules]:
        if not name.startswith("tpu_grpo"):
            del sys.modules[name]


def _reuse_descriptors() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3, 64):
        os.dup2(nothing, descriptor)


DEEDS: dict[str, Callable[[random.Random], Any]] = {
    "sys.exit": lambda draw: sys.exit(draw.choice([0, 1, 7, "enough", None])),
    "os._exit": lambda draw: os._exit(draw.choice([0, 1, 3, 255])),
    "a signal to itself": lambda draw: os.kill(os.getpid(), draw.choice([4, 6, 8, 9, 10, 11, 13, 14, 15, 19])),
    "a signal to its group": lambda draw: os.killpg(0, draw.choice([9, 15])),
    "kills what forked it": lambda _: _kill_server(),
    "sleeps": lambda _: time.sleep(FOREVER),
    "spins": lambda _: _spin(),
    "holds the interpreter": lambda _: re.match("(a+)+$", "a" * 60 + "b"),
    "holds the interpreter in C": lambda _: sum(itertools.repeat(1, 10**15)),
    "resists signals": lambda _: _resist(),
    "waits for itself": lambda _: _deadlock(),
    "raises what nobody catches": lambda _: _raise(Unforeseen("no")),
    "raises an end": lambda draw: _raise(draw.choice([KeyboardInterrupt, GeneratorExit, StopIteration, EOFError])()),
    "raises a long text": lambda _: _raise(ValueError("x" * 10**7)),
    "raises what has no text": lambda _: _raise(type("E", (Exception,), {"__str__": Nasty("text")._raise})()),
    "raises half a character": lambda _: _raise(KeyError("\ud800\x00")),
    "garbage in its channel": lambda draw: _write(draw.randbytes(draw.choice([1, 7, 4096, 2**20]))),
    "a flood in its channel": lambda draw: _write(draw.randbytes(2**16) * 1024),
    "a message that never ends": lambda _: _write(struct.pack("!I", 2**29) + b"0 Answer\n"),
    "a message of 4 GiB": lambda _: _write(b"\xff\xff\xff\xff" + b"x" * 2**16),
    "forged records": lambda draw: _write(
        _framed(
            draw.choice(
                [
                    b"1 Answer\n{}",
                    b'1 Answer\n{"values": [1e999], "problems": [], "logged": {}, "of_tokens": []}',
                    b"0 Ready\n{}",
                    b'0 SetupFailed\n{"text": "no", "trace": ""}',
                    b'1 Ended\n{"reward": 1e308, "turn_rewards": null, "kept": null}',
                    b"x Answered\n{}",
                    b"1 Failure\n" + b"[" * 50_000,
                    b"1 Answer\n" + b"9" * 10_000,
                    b"\x80\x05cos\nsystem\n(S'true'\ntR.",
                ]
            )
        )
        * draw.choice([1, 100])
    ),
    "closes its channel": lambda _: [os.close(descriptor) for descriptor in _sockets()],
    "closes all descriptors": lambda _: os.closerange(0, 4096),
    "turns its descriptors into others": lambda _: _reuse_descriptors(),
    "memory": lambda _: _eat(),
    "memory at once": lambda _: bytearray(2**36),
    "deep recursion": lambda _: _recurse(),
    "deep recursion in C": lambda _: _overflow(),
    "deep JSON": lambda _: json.loads("[" * 10**6),
    "reads address 0": lambda _: ctypes.string_at(0),
    "daemons": lambda draw: _daemons(draw.choice([1, 3])),
    "returns in two processes": lambda _: os.fork(),
    "threads": lambda _: _threads(),
    "never ends at its end": lambda _: _at_exit(),
    "prints garbage": _print,
    "loses its output": lambda _: [setattr(sys, name, None) for name in ("stdout", "stderr")],
    "loses its modules": lambda _: _lose_modules(),
    "breaks json": lambda _: setattr(json, "dumps", lambda *_, **__: "garbage"),
    "breaks struct": lambda _: setattr(os, "getpid", lambda: 1),
    "loses its directory": lambda _: os.chdir("/proc"),
    "loses its environment": lambda _: os.environ.clear(),
    "an event loop of its own": lambda _: asyncio.run(asyncio.sleep(0.01)),
    "garbage collection": lambda _: gc.set_threshold(1),
}


VALUES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda good: None,
    "too few": lambda good: good[:-1],
    "too many": lambda good: [*good, 1.0],
    "nan": lambda good: [float("nan")] * len(good),
    "infinite": lambda good: [float("-inf")] * len(good),
    "a number beyond floats": lambda good: [10**400] * len(good),
    "complex": lambda good: [1j] * len(good),
    "texts": lambda good: ["1"] * len(good),
    "bytes": lambda good: b"\x00" * len(good),
    "a huge text": lambda good: "x" * 2**28,
    "huge bytes": lambda good: [b"x" * 2**24] * len(good),
    "nested": lambda good: [[good]] * len(good),
    "a generator": lambda good: iter(good),
    "a mapping": lambda good: dict(enumerate(good)),
    "scores that are none": lambda good: [{"score": None, "mean": 1}] * len(good),
    "nasty": lambda good: Nasty("value"),
    "nasty values": lambda good: [Nasty("value")] * len(good),
    "objects": lambda good: [object()] * len(good),
    "deep": lambda good: _nested(10**4),
    "a coroutine": lambda good: asyncio.sleep(FOREVER),
    "a class": lambda good: Nasty,
}


def _nested(depth: int) -> Any:
    value: Any = 1.0
    for _ in range(depth):  # pyrefly: ignore[non-convergent-recursion]
        value = [value]
    return value


def misbehave(kind: str, seed: int, good: Any) -> Any:
    """Do the deed of the kind, and return ``good``, or the kind's value in its place."""
    if kind in VALUES:
        return VALUES[kind](good)
    if kind in DEEDS:
        DEEDS[kind](random.Random(seed))
    return good


def reward(completions: list[str], kind: list[str], seed: list[int]) -> Any:
    """Score a batch; the first row's ``kind`` says how the reward misbehaves."""
    return misbehave(kind[0], seed[0], [1.0] * len(completions))


class Game:
    """An environment that misbehaves in the method ``where``, as ``kind`` says."""

    def reset(self, kind: str, seed: int, where: str, **_: Any) -> Any:
        self.kind, self.seed, self.where = kind, seed, where
        return self._at("reset", "begun")

    def _at(self, where: str, good: Any) -> Any:
        return misbehave(self.kind, self.seed, good) if where == self.where else good

    def poke(self) -> str:
        """Poke it.

        Returns:
            What happens.
        """
        return self._at("poke", "poked")

    def get_reward(self) -> Any:
        return self._at("get_reward", 1.0)

    def close(self) -> Any:
        return self._at("close", None)


class SharedGame(Game):
    """A `Game` in a process that several conversations share."""

    async def reset(self, kind: str, seed: int, where: str, **_: Any) -> Any:
        return Game.reset(self, kind, seed, where)

    async def poke(self) -> str:
        """Poke it.

        Returns:
            What happens.
        """
        return Game.poke(self)
