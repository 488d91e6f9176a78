"""How processes end: from any thread, whatever happens to their output; all hosts together; and by signals."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts.processes import REPOSITORY, run
from tpu_grpo.hosts import StopRequest

LINE = "LockstepError: lost host 1 (seen by host 0, in stage rollout)\n"
PROLOGUE = """
import concurrent.futures, fcntl, os, signal, sys, threading, time
from pathlib import Path
from tpu_grpo.hosts import ending
from tpu_grpo.hosts.ending import end_after, end_process, this_process, leave_when_done

this_process.stage = "rollout"
signal.alarm(20)
forever = threading.Event().wait

def closed(stream):
    reader, writer = os.pipe()
    os.dup2(writer, stream)
    os.close(reader)

def full(stream):
    reader, writer = os.pipe()
    os.dup2(writer, stream)
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)

def from_a_thread(call, *arguments):
    threading.Thread(target=call, args=arguments, daemon=True).start()
    forever()
"""


def ended(body: str) -> tuple[int, str, float]:
    """Return the exit code, stderr and the seconds of a process."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    return done.returncode, done.stderr, time.monotonic() - began


@pytest.mark.parametrize(
    ("stderr", "log"),
    [
        *itertools.product(("", "full(2)"), ("host.log", "/dev/full", "a pipe", "gone/host.log")),
        ("closed(2)", "host.log"),
        ("os.close(2)", "host.log"),
    ],
)
def test_a_process_ends_whatever_takes_its_last_line(tmp_path: Path, stderr: str, log: str) -> None:
    """A pipe that nobody reads stands for a disk that hangs."""
    path = tmp_path / log
    if log == "host.log":
        path.write_text("earlier\n")
    prepare = f"os.mkfifo({str(path)!r})" if log == "a pipe" else "pass"
    code, errors, seconds = ended(
        f"{prepare}\nthis_process.log = Path({str(path)!r})\n{stderr or 'pass'}\n"
        "from_a_thread(end_process, 'lost host 1')"
    )
    assert code == 3
    assert errors == ("" if stderr else LINE)
    assert seconds < 10
    if log == "host.log":
        assert path.read_text() == f"earlier\n{LINE}"


def test_a_full_stdout_and_a_lock_of_the_main_thread_hinder_no_end() -> None:
    code, errors, seconds = ended(
        """
        import logging
        full(1)
        logging.getLogger().addHandler(handler := logging.StreamHandler())
        handler.acquire()
        sys.stdout.write("x")
        from_a_thread(end_process, "lost host 1")
        """
    )
    assert (code, errors) == (3, LINE)
    assert seconds < 10


def test_what_another_host_told_is_the_cause() -> None:
    for outcome, code in (("failed", 3), ("stopped", 4)):
        cause = f"this_process.cause = ending.End({outcome!r}, {code}, 'host 2 says why')"
        found, errors, _ = ended(f"{cause}\nfrom_a_thread(end_process, 'lost host 0')")
        assert (found, errors) == (code, "host 2 says why (seen by host 0, in stage rollout)\n")


def test_an_error_of_another_thread_is_printed_before_the_others_hear_of_it() -> None:
    code, errors, _ = ended(
        """
        from_a_thread(end_after, "OSError: step 3: no space", 1, lambda: os.write(2, b"told the others\\n"))
        """
    )
    assert (code, errors) == (1, "OSError: step 3: no space (seen by host 0, in stage rollout)\ntold the others\n")


# --- the main thread leaves -------------------------------------------------------------------------------------------

WAITING = {
    "a thread": "threading.Thread(target=forever).start()",
    "an executor": "concurrent.futures.ThreadPoolExecutor().submit(forever)",
    "atexit": "import atexit; atexit.register(forever)",
    "a pipe of stderr that nobody reads": "full(2)",
    "nothing": "pass",
}


@pytest.mark.parametrize("waiting", WAITING)
def test_a_failing_process_leaves_its_threads_behind(waiting: str) -> None:
    """Such as those of Orbax, which wait for other hosts."""
    code, errors, seconds = ended(
        f"""
        ending.LEAVING_SECONDS = 1.0
        {WAITING[waiting]}
        this_process.leaving_with = 2
        leave_when_done()
        raise KeyError("a bug")
        """
    )
    assert code == 2
    assert errors.endswith("KeyError: 'a bug'\n") or "stderr" in waiting
    assert seconds < 10


def test_an_end_that_others_notice_waits_for_the_error_of_the_main_thread() -> None:
    code, errors, seconds = ended(
        """
        this_process.leaving_with = 2
        leave_when_done()
        threading.Thread(target=end_process, args=["lost host 0"], daemon=True).start()
        time.sleep(1)
        raise KeyError("a bug")
        """
    )
    assert code == 2
    assert errors.endswith("KeyError: 'a bug'\n")
    assert "LockstepError" not in errors
    assert seconds < 8


# --- hosts leave together --------------------------------------------------------------------------------------------

WATCHED_BY_A_FAKE = """
import json, os, sys, threading, time
import jax
from tpu_grpo.hosts import Hosts, Watch
from tpu_grpo.hosts.ending import this_process

class Service:
    '''Host 0 beats, until it is frozen with the service that it runs.'''
    def __init__(self, frozen_at):
        self.values, self.frozen_at = {{}}, time.monotonic() + frozen_at
    def put(self, key, value, *, overwrite=False):
        self.values[key] = value
    def list(self, directory):
        if time.monotonic() > self.frozen_at:
            threading.Event().wait()
        self.values[directory + "/beat/0"] = b'[%d, {{}}]' % time.monotonic_ns()
        return {{key.removeprefix(directory + "/"): value for key, value in self.values.items()}}

this_process.index = 1
{body}
"""


def watched(body: str) -> subprocess.CompletedProcess[str]:
    code = WATCHED_BY_A_FAKE.format(body=body)
    environment = {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40, env=environment)


@pytest.mark.full
def test_a_frozen_host_0_is_noticed_though_nobody_reads_what_this_one_says() -> None:
    done = watched(
        """
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
with Watch(Hosts(1, 2, Service(frozen_at=1)), timeout_seconds=2, every=0.3):
    time.sleep(30)
"""
    )
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.slow  # its waiting is long
def test_an_error_that_nobody_reads_is_told_to_the_other_hosts() -> None:
    """The pipe is full, so that whoever prints to it waits."""
    done = watched(
        """
from tpu_grpo.cli.starting import _errors_printed_first
from tpu_grpo.records.errors import DataError, say
reader, writer = os.pipe()
os.dup2(writer, 2)
os.set_blocking(2, False)
try:
    while os.write(2, b"x" * 4096):
        pass
except BlockingIOError:
    os.set_blocking(2, True)
service = Service(frozen_at=100)
service.values["tpu_grpo/watch/heard/0"] = b""
def show():
    while (told := service.values.get("tpu_grpo/watch/failure/1")) is None:
        time.sleep(0.1)
    print(json.loads(told)["message"], flush=True)
threading.Thread(target=show).start()
with Watch(Hosts(1, 2, service), timeout_seconds=20, every=0.3), _errors_printed_first():
    raise DataError("a.jsonl:7 is no JSON")
"""
    )
    assert (done.returncode, done.stdout) == (2, "LockstepError: host 1 failed: DataError: a.jsonl:7 is no JSON\n")


@pytest.mark.full
def test_a_host_that_cannot_watch_any_more_ends() -> None:
    done = watched(
        """
Service.list = lambda self, directory: {"beat/1": b"", "beat/0": b"what is this"}
with Watch(Hosts(1, 2, Service(frozen_at=100)), timeout_seconds=20, every=0.3):
    time.sleep(30)
"""
    )
    assert done.returncode == 3
    assert "only the hosts of a run may write what they tell each other, got what no host tells" in done.stderr
    assert "(seen by host 1, in stage " in done.stderr


@pytest.mark.full
def test_hosts_that_disagree_each_print_it_and_leave_together() -> None:
    ended = run(
        """
        with Watch(hosts, timeout_seconds=40, every=5) as watch:
            hosts.agree("run.seed", str(index))
        """,
        2,
    )
    for end in ended.values():
        assert end.code == 3, end
        assert "run.seed differs: host 0 has '0'; host 1 has '1'" in end.errors
        assert end.errors.count("LockstepError") == 1
    assert abs(ended[0].at - ended[1].at) < 4  # on an idle machine under 2


@pytest.mark.full
@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_host_whose_output_nobody_reads_and_whose_disk_is_full_ends_with_3(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_GRPO_SECRET", "a secret of the test")  # else host 0 says that it has none
    ended = run(
        f"""
        from pathlib import Path
        from tpu_grpo.hosts.ending import this_process
        with Watch(hosts, timeout_seconds=40, every=2), Watch(Hosts()).stage("saving step 3"):
            hosts.barrier("all are here")
            if index == {failing}:
                raise OSError(28, "No space left on device")
            this_process.log = Path("/dev/full")
            reader, writer = os.pipe()
            os.dup2(writer, 2)
            os.close(reader)
            time.sleep(30)
        """,
        2,
    )
    assert ended[failing].code == 1, ended
    assert ended[failing].errors.endswith("OSError: [Errno 28] No space left on device\n")
    assert (ended[1 - failing].code, ended[1 - failing].errors) == (3, ""), ended
    assert abs(ended[0].at - ended[1].at) < 4


# --- signals ---------------------------------------------------------------------------------------------------------

SIGNALLED = """
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
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALLED + body],
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


def after(body: str, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
    """The code of a process that gets a signal once it is ready, and what it prints from then on."""
    with started(body) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    return process.returncode, out, err


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
    code, _, err = after("with SignalledStop() as stop:\n    ready()\n    busy()")
    assert code == 4
    assert err.startswith("SIGTERM: the run is ended before its first step (seen by host 0")


def test_a_signal_before_hosts_meet_is_kept_until_the_others_can_be_told() -> None:
    body = """
with SignalledStop(meets_others=True) as stop:
    ready()
    while stop._kept is None:
        time.sleep(0.01)
    time.sleep(0.5)
    print("met", flush=True)
    stop.hosts_met(lambda end: print("told", end.outcome, end.code, flush=True))
    busy()
"""
    code, out, err = after(body)
    assert (code, out) == (4, "met\ntold stopped 4\n")
    kept, last = err.splitlines()
    assert kept.startswith("SIGTERM: the run ends before its first step, as soon as all hosts have met; ")
    assert last.startswith("SIGTERM: the run is ended before its first step (seen by host 0")


def test_a_run_outlives_its_terminal() -> None:
    body = """
with SignalledStop():
    ready()
    busy(10**6)
    print("went on", flush=True)
"""
    assert after(body, signal.SIGHUP)[:2] == (0, "went on\n")


def test_a_second_signal_before_hosts_meet_ends_the_process() -> None:
    with started("with SignalledStop(meets_others=True) as stop:\n    ready()\n    busy()") as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("SIGINT: the run ends before its first step, as soon as")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 4


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
    assert after(body)[:2] == (0, "abandoned True\nnot entered\n")


@pytest.mark.parametrize("then", ["pass", "time.sleep(60)"])
def test_a_signal_whose_exception_was_lost_still_ends_the_block(then: str) -> None:
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
            THEN
    except StepAbandoned:
        print("abandoned", flush=True)
"""
    assert after(body.replace("THEN", then))[:2] == (0, "went on\nabandoned\n")


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
    assert after(body)[0] == 4
