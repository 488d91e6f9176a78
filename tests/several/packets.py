"""Sends broken packets to every port of a run of two hosts, which must continue nevertheless.

    uv run python -m tests.several.packets --packets 2000

First host 1 is suspended, so that the packets reach host 0 while it waits for the other host (`hosts.meeting`). Then
they reach jax's coordination service, which takes over that port, while steps are done; then every other port on which
a process of the run listens. At the end the run is stopped, and both hosts must end with exit code 4. Packets are
random by ``--seed``, and sent one after the other to 127.0.0.1, at most ``--rate`` a second. The hosts have a secret.
"""

import argparse
import json
import os
import random
import secrets
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.several.kills import END_SECONDS, last_step, start_hosts
from tests.several.runs import settings, write_files
from tpu_grpo.hosts.authentication import VARIABLE
from tpu_grpo.hosts.meeting import Caller

SECONDS = 0.05
"""The longest wait for an answer."""
SILENT = 40
"""The most connections that stay open without sending anything."""
NASTY: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**63,
    1e308,
    "",
    "x" * 70_000,
    "\x1b[2J",
    "\ud800",
    [],
    {},
    [[]],
    "run",
)
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TLS = bytes.fromhex("16030100c8010000c40303")


def packet(draw: random.Random) -> bytes:
    """Draw a packet: a host's first line with a fault, a frame of HTTP/2 as gRPC sends it, or other bytes."""
    said: Any = json.loads(Caller("run", draw.choice([0, 1, 2, 10**9]), draw.choice([1, 2, 3])).to_line())
    match draw.randrange(9):
        case 0:
            return b""
        case 1:
            return draw.randbytes(draw.choice([1, 8, 100, 70_000]))
        case 2:
            said[draw.choice([*said, "more"])] = draw.choice(NASTY)
            return json.dumps(said).encode() + b"\n"
        case 3:
            line = json.dumps(said).encode() + b"\n"
            return line[: draw.randrange(len(line))]
        case 4:
            return json.dumps(said).encode() + b"\n" + draw.randbytes(20)
        case 5:
            return draw.choice([b"[" * 60_000, b'{"a":' * 10_000, b"9" * 5000, b"\n" * 1000]) + b"\n"
        case 6:  # length, kind, flags, stream, payload
            size = draw.choice([0, 5, 6, 200])
            head = struct.pack(">I", size)[1:] + bytes([draw.randrange(12), draw.randrange(256)])
            return HTTP_2 + bytes.fromhex("000000040000000000") + head + draw.randbytes(4) + draw.randbytes(size)
        case 7:
            return draw.choice([b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", TLS + draw.randbytes(189), HTTP_2])
        case _:
            return struct.pack("<q", draw.choice([-1, 0, 1, 2, 2**40]))  # gloo asks for a number of 8 bytes


def send(port: int, what: bytes, draw: random.Random, silent: list[socket.socket]) -> None:
    """Send one packet, and close or reset the connection; some connections stay open without a packet."""
    with suppress(OSError):
        connection = socket.create_connection(("127.0.0.1", port), timeout=1.0)
        if draw.random() < 1 / 50:
            silent.append(connection)
            if len(silent) > SILENT:
                silent.pop(0).close()
            return
        with connection:
            connection.sendall(what)
            if draw.random() < 1 / 2:
                connection.settimeout(SECONDS)
                connection.recv(1000)
            if draw.random() < 1 / 4:  # reset the connection instead of closing it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def listening(started: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Return the ports on which processes of the run listen."""
    found: set[int] = set()
    for process in started:
        with suppress(psutil.Error):
            root = psutil.Process(process.pid)
            for one in (root, *root.children(recursive=True)):
                found |= {c.laddr[1] for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return sorted(found)


def await_true(what: str, true: Any, started: Sequence[subprocess.Popen[bytes]], errors: Path) -> None:
    """Wait until ``true`` returns true; ``what`` names the condition.

    Raises:
        AssertionError: a host has ended, or END_SECONDS have passed.
    """
    end = time.monotonic() + END_SECONDS
    while not true():
        codes = [process.poll() for process in started]
        if codes != [None] * len(codes) or time.monotonic() > end:
            raise AssertionError(f"the run must come to {what}, got {codes}: {errors.read_text()[-2000:]}")
        time.sleep(0.1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packets", type=int, default=2000, help="to every port")
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    draw, counts = random.Random(options.seed), {}
    os.environ[VARIABLE] = secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="tpu_grpo_packets_") as scratch:
        files, run_dir = write_files(Path(scratch) / "files"), Path(scratch) / "run"
        tree = settings(run_dir, run={"max_steps": 100_000})
        started, errors = start_hosts(files, tree, 2), files / "host_0.err"
        silent: list[socket.socket] = []

        def attack(name: str, port: int) -> None:
            for _ in range(options.packets):
                began = time.monotonic()
                send(port, packet(draw), draw, silent)
                time.sleep(max(0.0, 1 / options.rate - (time.monotonic() - began)))
            counts[f"{name}, port {port}"] = options.packets
            print(f"{options.packets} packets to {name}, port {port}", flush=True)

        def go_on() -> None:
            done = last_step(run_dir)
            await_true(f"step {done + 2}", lambda: last_step(run_dir) > done + 1, started, errors)

        try:
            started[1].send_signal(signal.SIGSTOP)
            await_true("its meeting", lambda: listening(started[:1]), started, errors)
            [coordinator] = listening(started[:1])
            attack("the meeting", coordinator)
            started[1].send_signal(signal.SIGCONT)
            go_on()
            attack("jax's coordination service", coordinator)
            go_on()
            for port in set(listening(started)) - {coordinator}:
                attack("gloo", port)
                go_on()
            for process in started:
                process.send_signal(signal.SIGTERM)
            codes = [process.wait(END_SECONDS) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        print(json.dumps({**counts, "steps": last_step(run_dir), "codes": codes}))
        if codes != [4, 4]:
            raise SystemExit(f"both hosts must end with 4, got {codes}: {errors.read_text()[-2000:]}")


if __name__ == "__main__":
    main()
