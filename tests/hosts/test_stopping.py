"""Signals that ask a run to stop: said at once, whatever the main thread is doing, and ended by the second."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tpu_grpo.hosts import StopRequest

PROLOGUE = """
import sys, time
from hashlib import pbkdf2_hmac
from tpu_grpo.records.errors import Interrupted
from tpu_grpo.hosts import SignalledStop, StepAbandoned

def busy(rounds=3 * 10**7):
    pbkdf2_hmac("sha512", b"", b"", rounds)  # in C for half a minute, without the interpreter's lock, as a compiler is

def ready():
    print("ready", flush=True)
"""


@contextmanager
def started(body: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is ready for signals."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def after_sigterm(body: str) -> str:
    """What a process prints that gets a SIGTERM once it is ready, and then ends well."""
    with started(body) as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
        assert process.returncode == 0
    return out


def test_a_caller_asks_after_a_step_and_abandons_none() -> None:
    answers = iter([False, True])
    stop = StopRequest(lambda: next(answers))
    with stop.abandoning():
        assert not stop.asked
    assert not stop.signalled
    assert stop.asked


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_first_signal_is_answered_at_once_and_the_second_ends_the_process(name: str) -> None:
    with started("with SignalledStop() as stop:\n    stop.begin()\n    ready()\n    busy()") as process:
        assert process.stderr is not None
        process.send_signal(getattr(signal, name))
        assert process.stderr.readline() == (
            f"{name}: the run stops as soon as nothing is lost, and saves a checkpoint; the same signal again ends it "
            "at once\n"
        )
        assert process.poll() is None
        sent = time.monotonic()
        process.send_signal(getattr(signal, name))
        assert process.wait(timeout=10) == 1
        assert time.monotonic() - sent < 10
        assert process.stderr.read().startswith(
            f"{name}: the run is ended at once; its newest checkpoint stays where it is (seen by host 0"
        )


def test_before_the_first_step_a_signal_ends_the_process() -> None:
    with started("with SignalledStop() as stop:\n    ready()\n    busy()") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 4
        assert process.stderr is not None
        assert process.stderr.read().startswith("SIGTERM: the run is ended before its first step (seen by host 0")


def test_a_block_that_may_be_abandoned_is_left_at_once() -> None:
    body = """
with SignalledStop() as stop:
    stop.begin()
    try:
        with stop.abandoning():
            ready()
            time.sleep(60)
    except StepAbandoned:
        print("abandoned", stop.signalled, flush=True)
    try:
        with stop.abandoning():
            print("entered", flush=True)
    except StepAbandoned:
        print("not entered", flush=True)
"""
    assert after_sigterm(body) == "abandoned True\nnot entered\n"


def test_a_signal_whose_exception_was_lost_still_ends_the_block() -> None:
    """Python swallows what a handler raises while it finalizes an object."""
    body = """
class Slow:
    def __del__(self):
        ready()
        time.sleep(60)

with SignalledStop() as stop:
    stop.begin()
    slow = Slow()
    try:
        with stop.abandoning():
            del slow
            print("went on", flush=True)
    except StepAbandoned:
        print("abandoned", flush=True)
"""
    assert after_sigterm(body) == "went on\nabandoned\n"


def test_a_stopped_run_does_not_wait_for_threads_that_go_on() -> None:
    """Such as a reward's, on a thread of the main process."""
    body = """
import threading
with SignalledStop() as stop:
    stop.begin()
    threading.Thread(target=busy).start()
    ready()
    while not stop.signalled:
        time.sleep(0.01)
    raise Interrupted("stopped")
"""
    with started(body) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 4
