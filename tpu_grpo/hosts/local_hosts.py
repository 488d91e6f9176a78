"""Runs several hosts on one machine, each a process with its own CPU devices, for tests and laptops.

The order of events when host 1 of three fails with code 3:

    host 1 ends with 3            the other hosts have ``grace_seconds`` to end by themselves
    SIGTERM to those still there  ``KILL_AFTER_SECONDS`` pass
    SIGKILL to those still there  the result is 3

and when the user stops the run with Ctrl-C, SIGTERM or by closing the terminal:

    SIGTERM to all                a training run saves a checkpoint and ends with 4; ``grace_seconds`` pass
    SIGKILL to those still there  immediately after a second Ctrl-C
"""

import contextlib
import math
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

from tpu_grpo.hosts.authentication import VARIABLE
from tpu_grpo.hosts.joining import DEVICE_COUNT_FLAG
from tpu_grpo.records.errors import ConfigError

KILL_AFTER_SECONDS = 5.0
"""The time from SIGTERM to SIGKILL, and the longest wait for the output of an ended host's children."""

LONGEST_WAIT_SECONDS = 1.0
"""The main thread wakes this often to run signal handlers: a signal that another thread receives does not wake it."""

OWN_SETTINGS = ("hosts.coordinator", "hosts.count", "hosts.index")


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

    Every host has ``devices_per_host`` CPU devices. Its output appears line by line, after ``[i] ``, on ``stdout`` and
    ``stderr``, by default this process's. Returns 0 if every host returned 0, otherwise the code of the host that
    failed first (1 if a signal killed it). Afterwards no host, nor any process of its group, is alive. Call this on the
    main thread: it handles SIGINT, SIGTERM and SIGHUP. Raises ConfigError for wrong arguments, before any host starts.
    """
    if hosts < 1:
        raise ConfigError(f"--hosts must be >= 1, got {hosts}; give the number of processes to start, for example 2")
    if devices_per_host < 1:
        raise ConfigError(
            f"--devices-per-host must be >= 1, got {devices_per_host}; give the CPU devices of each process, for "
            "example 4"
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
    supervisor = _Supervisor(stdout or sys.stdout.buffer, stderr or sys.stderr.buffer, grace_seconds)
    environment = {VARIABLE: secrets.token_hex(32), **host_environment(os.environ, devices_per_host)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # the port is free now; host 0 takes it a moment later
        port = probe.getsockname()[1]
    shared = [*command, *arguments, f"hosts.coordinator=127.0.0.1:{port}", f"hosts.count={hosts}"]
    with _handle_signals(supervisor.request_stop):
        try:
            for index in range(hosts):
                supervisor.start(index, [*shared, f"hosts.index={index}"], environment)
            return supervisor.wait()
        finally:
            supervisor.kill_all()


def host_environment(environment: Mapping[str, str], devices: int) -> dict[str, str]:
    """Return a host's environment variables: ``devices`` CPU devices, and unbuffered output."""
    kept = [flag for flag in environment.get("XLA_FLAGS", "").split() if flag.partition("=")[0] != DEVICE_COUNT_FLAG]
    own = {"XLA_FLAGS": " ".join([*kept, f"{DEVICE_COUNT_FLAG}={devices}"]), "JAX_PLATFORMS": "cpu"}
    return {"PYTHONUNBUFFERED": "1", **environment, **own}


@contextlib.contextmanager
def _handle_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """In the block, signals that would end this program call ``request_stop`` with their name instead."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it, so that the run outlives the terminal
        numbers.append(signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda received, _: request_stop(signal.Signals(received).name))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _HostProcess:
    """Runs one process in its own process group, so that a terminal's Ctrl-C reaches only this program.

    ``show(line, is_error)`` gets each line of output; ``is_error`` means stderr. Once the process has ended and its
    output is shown, another thread calls ``on_exit(code, time)`` with the exit code (negative for a signal, as in
    subprocess) and the time of the end.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        show: Callable[[bytes, bool], None],
        on_exit: Callable[[int, float], None],
    ):
        self._show, self._on_exit = show, on_exit
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
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; macOS raises PermissionError then
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self) -> None:
        pairs = ((self._process.stdout, False), (self._process.stderr, True))
        readers = [threading.Thread(target=self._copy, args=pair, daemon=True) for pair in pairs]
        for reader in readers:
            reader.start()
        code = self._process.wait()
        ended = time.monotonic()
        self._kill_group()  # its workers that still run; their group id cannot have been reused yet
        for reader in readers:
            reader.join(timeout=max(0.0, ended + KILL_AFTER_SECONDS - time.monotonic()))
        self._on_exit(code, ended)

    def _copy(self, pipe: BinaryIO, is_error: bool) -> None:
        with pipe:
            for line in pipe:
                self._show(line, is_error)


class _Supervisor:
    """Tracks which hosts still run, and schedules the signals that end them.

    Only the main thread changes this object's state. Other threads and signal handlers put functions into ``_events``,
    and the main thread calls these functions. Other threads also show lines of output.
    """

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO, grace_seconds: float):
        self._stdout, self._stderr, self._grace_seconds = stdout, stderr, grace_seconds
        self._writing = threading.Lock()  # one lock for both streams: they may be the same terminal
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started: list[_HostProcess] = []
        self._live: dict[int, _HostProcess] = {}
        self._failures: list[tuple[float, int]] = []
        """(time of the end, exit code) of each failed host."""
        self._stop_reasons: set[str] = set()
        self._schedule: list[tuple[float, signal.Signals]] = []
        """(time, signal to send then to the hosts that still run); empty until a host fails or a stop is requested."""

    def start(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        def show(line: bytes, is_error: bool) -> None:
            self._show(self._stderr if is_error else self._stdout, f"[{index}] ".encode() + line)

        def on_exit(code: int, ended: float) -> None:
            self._events.put(lambda: self._exited(index, code, ended))

        self._live[index] = _HostProcess(command, environment, show, on_exit)
        self._started.append(self._live[index])

    def request_stop(self, reason: str) -> None:
        """Ask all hosts to end; may be called from any thread."""
        self._events.put(lambda: self._stop(reason))

    def wait(self) -> int:
        """Wait until all hosts have ended; returns 0, or the exit code of the host that failed first."""
        while self._live:
            due = self._schedule[0][0] - time.monotonic() if self._schedule else LONGEST_WAIT_SECONDS
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=min(max(due, 0.0), LONGEST_WAIT_SECONDS))()
            while self._schedule and self._live and self._schedule[0][0] <= time.monotonic():
                _, number = self._schedule.pop(0)
                self._say(f"{number.name} to host {', '.join(map(str, self._live))}")
                for host in self._live.values():
                    host.send(number)
        return max(min(self._failures)[1], 1) if self._failures else 0

    def kill_all(self) -> None:
        """Kill the hosts that still run, and wait until they have ended."""
        for host in self._started:
            host.send(signal.SIGKILL)
        for host in self._started:
            host.waiter.join()

    def _show(self, stream: BinaryIO, line: bytes) -> None:
        """Write one whole line, whatever other threads write; stop all hosts if nobody reads the output."""
        with self._writing:
            try:
                stream.write(line.removesuffix(b"\n") + b"\n")
                stream.flush()
            except BrokenPipeError:  # as in ``... | head``: stop, but keep reading so that no host blocks
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                self.request_stop("nobody reads the output")

    def _say(self, text: str) -> None:
        self._show(self._stderr, f"[hosts] {text}".encode())

    def _exited(self, index: int, code: int, ended: float) -> None:
        del self._live[index]
        if code == 0:
            return
        self._failures.append((ended, code))
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        if self._live and not self._schedule and not self._stop_reasons and len(self._failures) == 1:
            stop = time.monotonic() + self._grace_seconds
            self._schedule = [(stop, signal.SIGTERM), (stop + KILL_AFTER_SECONDS, signal.SIGKILL)]
            how += f"; the others have {self._grace_seconds:g} s to end by themselves"
        self._say(f"host {index} {how}")

    def _stop(self, reason: str) -> None:
        now = time.monotonic()
        again, first = reason in self._stop_reasons, not self._stop_reasons
        self._stop_reasons.add(reason)
        if again and reason == signal.SIGINT.name:  # not SIGTERM or SIGHUP: shell and terminal may each send one
            self._schedule = [(now, signal.SIGKILL)]
        if not first:
            return
        self._say(f"stopping ({reason}): hosts have {self._grace_seconds:g} s to end; a second Ctrl-C kills them")
        kill = min([now + self._grace_seconds, *(at for at, number in self._schedule if number == signal.SIGKILL)])
        self._schedule = [(now, signal.SIGTERM), (kill, signal.SIGKILL)]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
