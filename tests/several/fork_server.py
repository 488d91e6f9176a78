"""Starts a host's program in a process that has imported already what hosts import: a third of what a short run costs.

    python fork_server.py serve DIRECTORY NUMBER     the server: forks a process for each client until its input ends
    python -S fork_server.py DIRECTORY PROGRAM ...   the client, which whoever starts the host signals and awaits

A client hands over its words, variables, directory and streams. The program runs in a fork, as a member of the client's
process group; the client passes signals on, and ends as the program does. Variables that a module reads when it is
imported, as jax its options, are the server's. Hosts with even and odd numbers have servers of their own, because
Python hashes text otherwise in every process that is started, and no order of a set may matter.
"""

import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORTED = "tpu_grpo.cli.train", "tpu_grpo.hosts.coordination_service", "tpu_grpo.run.inputs", "tpu_grpo.run.pipeline"
PASSED_ON = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
SERVERS = 2


def run_as_client(directory: str, words: list[str]) -> None:
    """Let a server run the program, and end as it ends."""
    index = next(int(word.partition("=")[2]) for word in words if word.startswith("hosts.index="))
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{directory}/{index % SERVERS}")
        asked = {"words": words, "variables": dict(os.environ), "directory": os.getcwd(), "group": os.getpgrp()}
        socket.send_fds(connection, [b" "], [0, 1, 2])
        connection.sendall(json.dumps(asked).encode() + b"\n")
        answers = connection.makefile()
        process = int(answers.readline())
        for number in PASSED_ON:
            signal.signal(number, lambda received, _: os.kill(process, received))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        status = int(answers.readline())
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.WEXITSTATUS(status))


def serve(address: str) -> dict[str, Any] | None:
    """Fork a process for each client, and return there what the client asks for; None in the server, once it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("listens", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if not os.fork():
                return forked(connection)
            connection.close()
    return None


def forked(connection: socket.socket) -> dict[str, Any]:
    """Fork once more: what a client asks for in the program's process, which the other one awaits for the client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, *_ = socket.recv_fds(connection, 1, 3)
    asked = json.loads(connection.makefile().readline())
    if process := os.fork():
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):  # the client was killed
            connection.sendall(f"{process}\n".encode())
            connection.sendall(f"{os.waitpid(process, 0)[1]}\n".encode())
        os._exit(0)
    connection.close()
    os.setpgid(0, asked["group"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)))
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w"), write_through=True) for number in (1, 2))
    return asked


def main() -> None:
    if sys.argv[1] != "serve":
        run_as_client(sys.argv[1], sys.argv[2:])
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # else every collection of a host looks through what was imported, and copies its memory
    gc.enable()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # OpenBLAS' threads survive forks
        asked = serve("/".join(sys.argv[2:]))
    if asked is None:
        return
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    sys.argv = asked["words"]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    import_module("runpy").run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
