"""Hosts that fail leave together, soon, and with the right exit code, even where nobody reads what they say."""

import subprocess
import sys

import pytest

from tests.hosts.processes import REPOSITORY, run

WATCHED_BY_A_FAKE = """
import os, sys, threading, time
import jax
from tpu_grpo.hosts import Hosts, Watch
from tpu_grpo.hosts.ending import here

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

here.index = 1
{body}
"""


def watched(body: str) -> subprocess.CompletedProcess[str]:
    code = WATCHED_BY_A_FAKE.format(body=body)
    environment = {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40, env=environment)


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
    print(told.decode(), flush=True)
threading.Thread(target=show).start()
with Watch(Hosts(1, 2, service), timeout_seconds=20, every=0.3), _errors_printed_first():
    raise DataError("a.jsonl:7 is no JSON")
"""
    )
    assert (done.returncode, done.stdout) == (2, "DataError: a.jsonl:7 is no JSON\n")


def test_a_host_that_cannot_watch_any_more_ends() -> None:
    done = watched(
        """
Service.list = lambda self, directory: {"beat/0": b"what is this"}
with Watch(Hosts(1, 2, Service(frozen_at=100)), timeout_seconds=20, every=0.3):
    time.sleep(30)
"""
    )
    assert done.returncode == 1
    assert done.stderr.startswith("LockstepError: this host cannot watch the others any more: JSONDecodeError: ")
    assert "(seen by host 1, in stage " in done.stderr


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


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_host_whose_output_nobody_reads_and_whose_disk_is_full_ends_with_3(failing: int) -> None:
    ended = run(
        f"""
        from pathlib import Path
        from tpu_grpo.hosts.ending import here
        with Watch(hosts, timeout_seconds=40, every=2), Watch(Hosts()).stage("saving step 3"):
            hosts.barrier("all are here")
            if index == {failing}:
                raise OSError(28, "No space left on device")
            here.log = Path("/dev/full")
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
