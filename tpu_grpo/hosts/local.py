"""Several hosts on one machine: one process each, with CPU devices of its own, for tests and laptops.

The order of things when host 1 of three fails with code 3:

    host 1 ends with 3            the others notice by themselves, or not; ``grace_seconds`` pass
    SIGTERM to those still there  ``KILL_AFTER_SECONDS`` pass
    SIGKILL to those still there  the result is 3

and when the user stops the run with Ctrl-C, SIGTERM or by closing the terminal:

    SIGTERM to all                a training run saves a checkpoint and ends with 4; ``grace_seconds`` pass
    SIGKILL to those still there  at once after a second Ctrl-C
"""

import contextlib
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from tpu_grpo.errors import ConfigError
from tpu_grpo.hosts.platform import DEVICE_COUNT_FLAG

KILL_AFTER_SECONDS = 5.0
"""Between SIGTERM and SIGKILL; also how long output is awaited that an ended host left to a process of its own."""

LONGEST_WAIT_SECONDS = 1.0
"""Python runs signal handlers on the main thread only, and a signal that another thread received does not wake it."""

OWN_SETTINGS = ("hosts.coordinator", "hosts.count", "hosts.index")


@dataclass(frozen=True)
class _Ended:
    """A host is gone and everything it wrote is shown."""

    index: int
    code: int
    """As subprocess has it: negative for a signal."""
    at: float


@dataclass(frozen=True)
class _Asked:
    """The user wants everything to end."""

    reason: str


type _Events = queue.SimpleQueue[_Ended | _Asked]


def run_local_hosts(
    command: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    hosts: int,
    devices_per_host: int,
    grace_seconds: float = 60.0,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
) -> int:
    """Run ``command arguments hosts.coordinator=... hosts.count=... hosts.index=i`` once per host; wait for all.

    Every host has ``devices_per_host`` CPU devices. Its lines appear on this process' streams (or those given), whole,
    after ``[i] ``. Returns 0 if every host returned 0, otherwise the code of the host that failed first, 1 if a signal
    killed it. No host, nor a process in the group of one, is alive afterwards. Call it on the main thread: it handles
    SIGINT, SIGTERM and SIGHUP meanwhile. Raises ConfigError before anything is started.
    """
    _check(command, arguments, hosts, devices_per_host, grace_seconds)
    events: _Events = queue.SimpleQueue()
    output = _Output(stdout or sys.stdout.buffer, stderr or sys.stderr.buffer, events)
    environment = host_environment(os.environ, devices_per_host)
    shared = [*command, *arguments, f"hosts.coordinator=127.0.0.1:{_free_port()}", f"hosts.count={hosts}"]
    started: list[_Host] = []
    with _signals_become(events):
        try:
            for index in range(hosts):
                started.append(_Host(index, [*shared, f"hosts.index={index}"], environment, output, events))
            return _Watch(started, output, grace_seconds).until_all_ended(events)
        finally:
            for host in started:
                host.send(signal.SIGKILL)
            for host in started:
                host.waiter.join()


def host_environment(environment: Mapping[str, str], devices: int) -> dict[str, str]:
    """A host's environment: ``devices`` CPU devices, and lines that are written when they are printed."""
    kept = [flag for flag in environment.get("XLA_FLAGS", "").split() if flag.partition("=")[0] != DEVICE_COUNT_FLAG]
    own = {"XLA_FLAGS": " ".join([*kept, f"{DEVICE_COUNT_FLAG}={devices}"]), "JAX_PLATFORMS": "cpu"}
    return {"PYTHONUNBUFFERED": "1", **environment, **own}


def _check(command: Sequence[str], arguments: Sequence[str], hosts: int, devices: int, grace_seconds: float) -> None:
    if hosts < 1:
        raise ConfigError(f"--hosts must be >= 1, got {hosts}; give the number of processes to start, for example 2")
    if devices < 1:
        raise ConfigError(
            f"--devices-per-host must be >= 1, got {devices}; give the CPU devices of each process, for example 4"
        )
    if not (math.isfinite(grace_seconds) and grace_seconds >= 0):
        raise ConfigError(f"--grace must be a number of seconds >= 0, got {grace_seconds}; use 0 to stop at once")
    if not command or shutil.which(command[0]) is None:
        raise ConfigError(
            f"--command must name a program that can be started, got {' '.join(command)!r}; its first word must be an "
            "executable file or be found on the PATH"
        )
    for argument in arguments:
        if argument.partition("=")[0] in OWN_SETTINGS:
            raise ConfigError(
                f"{', '.join(OWN_SETTINGS)} are set for each host here, got {argument}; remove it and use --hosts"
            )


def _free_port() -> int:
    """A port that nobody listens on now; the host that takes it does so a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _signals_become(events: _Events) -> Iterator[None]:
    """Signals that end a program are put into ``events`` instead."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup means to outlive the terminal
        numbers.append(signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda received, _: events.put(_Asked(signal.Signals(received).name)))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Output:
    """Both streams of this process, one line at a time."""

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO, events: _Events):
        self.stdout, self.stderr = stdout, stderr
        self._events = events
        self._lock = threading.Lock()  # one for both: they may be the same terminal

    def say(self, text: str) -> None:
        self.line(self.stderr, b"[hosts] ", text.encode())

    def line(self, stream: BinaryIO, prefix: bytes, line: bytes) -> None:
        """Write one line, with a newline if it has none."""
        with self._lock:
            try:
                stream.write(prefix + line.removesuffix(b"\n") + b"\n")
                stream.flush()
            except BrokenPipeError:  # as in ``... | head``: end, and read on so that no host blocks meanwhile
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                self._events.put(_Asked("nobody reads the output"))


class _Host:
    """One process, leading a process group, so that a terminal's Ctrl-C reaches this program alone."""

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], output: _Output, events: _Events
    ):
        self.index = index
        self._output, self._events = output, events
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment, process_group=0
        )
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.waiter.start()

    def send(self, number: signal.Signals) -> None:
        """Signal the process, if it still runs; SIGKILL goes to its whole group."""
        if self._process.poll() is not None:
            return
        if number == signal.SIGKILL:
            self._kill_group()
        else:
            self._process.send_signal(number)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; macOS says the latter
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self) -> None:
        pairs = ((self._process.stdout, self._output.stdout), (self._process.stderr, self._output.stderr))
        readers = [threading.Thread(target=self._copy, args=pair, daemon=True) for pair in pairs]
        for reader in readers:
            reader.start()
        code = self._process.wait()
        at = time.monotonic()
        self._kill_group()  # workers it left behind; their number cannot have been given away yet
        for reader in readers:
            reader.join(timeout=max(0.0, at + KILL_AFTER_SECONDS - time.monotonic()))
        self._events.put(_Ended(self.index, code, at))

    def _copy(self, pipe: BinaryIO, stream: BinaryIO) -> None:
        prefix = f"[{self.index}] ".encode()
        with pipe:
            for line in pipe:
                self._output.line(stream, prefix, line)


class _Watch:
    """Who still runs, and what happens to them next."""

    def __init__(self, hosts: Sequence[_Host], output: _Output, grace_seconds: float):
        self._live = {host.index: host for host in hosts}
        self._output = output
        self._grace_seconds = grace_seconds
        self._failed: list[_Ended] = []
        self._asked: set[str] = set()
        """Why to end, so far."""
        self._plan: list[tuple[float, signal.Signals]] = []
        """When to send what to those still there, in order; empty while nothing is wrong."""

    def until_all_ended(self, events: _Events) -> int:
        """The exit code of all."""
        while self._live:
            due = self._plan[0][0] - time.monotonic() if self._plan else LONGEST_WAIT_SECONDS
            with contextlib.suppress(queue.Empty):
                match events.get(timeout=min(max(due, 0.0), LONGEST_WAIT_SECONDS)):
                    case _Ended() as end:
                        self._ended(end)
                    case _Asked(reason):
                        self._ask(reason)
            while self._plan and self._live and self._plan[0][0] <= time.monotonic():
                self._send(self._plan.pop(0)[1])
        first = min(self._failed, key=lambda end: end.at, default=None)
        return 0 if first is None else max(first.code, 1)

    def _ended(self, end: _Ended) -> None:
        del self._live[end.index]
        if end.code == 0:
            return
        self._failed.append(end)
        how = f"ended with exit code {end.code}" if end.code > 0 else f"was killed by {_signal_name(-end.code)}"
        if self._live and not self._plan and not self._asked and len(self._failed) == 1:
            stop = time.monotonic() + self._grace_seconds
            self._plan = [(stop, signal.SIGTERM), (stop + KILL_AFTER_SECONDS, signal.SIGKILL)]
            how += f"; the others have {self._grace_seconds:g} s to end by themselves"
        self._output.say(f"host {end.index} {how}")

    def _ask(self, reason: str) -> None:
        now = time.monotonic()
        again, first = reason in self._asked, not self._asked
        self._asked.add(reason)
        if again and reason == signal.SIGINT.name:  # others come twice by themselves: from a shell and its terminal
            self._plan = [(now, signal.SIGKILL)]
        if not first:
            return
        self._output.say(
            f"stopping ({reason}): hosts have {self._grace_seconds:g} s to end; a second Ctrl-C kills them"
        )
        kill = min([now + self._grace_seconds, *(at for at, number in self._plan if number == signal.SIGKILL)])
        self._plan = [(now, signal.SIGTERM), (kill, signal.SIGKILL)]

    def _send(self, number: signal.Signals) -> None:
        self._output.say(f"{number.name} to host {', '.join(map(str, self._live))}")
        for host in self._live.values():
            host.send(number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
