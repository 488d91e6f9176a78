"""Ending a process from any thread, whatever happens to its output and whatever other threads wait for."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.hosts.processes import REPOSITORY

LINE = "LockstepError: lost host 1 (seen by host 0, in stage rollout)\n"
PROLOGUE = """
import concurrent.futures, fcntl, os, signal, sys, threading, time
from pathlib import Path
from tpu_grpo.hosts import ending
from tpu_grpo.hosts.ending import end_after, end_process, here, leave_when_done

here.stage = "rollout"
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


def run(body: str) -> tuple[int, str, float]:
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


@pytest.mark.parametrize("stderr", ["", "closed(2)", "full(2)", "os.close(2)"])
@pytest.mark.parametrize("log", ["host.log", "/dev/full", "a pipe", "gone/host.log"])
def test_a_process_ends_whatever_takes_its_last_line(tmp_path: Path, stderr: str, log: str) -> None:
    """A pipe that nobody reads stands for a disk that hangs."""
    path = tmp_path / log
    if log == "host.log":
        path.write_text("earlier\n")
    prepare = f"os.mkfifo({str(path)!r})" if log == "a pipe" else "pass"
    code, errors, seconds = run(
        f"{prepare}\nhere.log = Path({str(path)!r})\n{stderr or 'pass'}\nfrom_a_thread(end_process, 'lost host 1')"
    )
    assert code == 3
    assert errors == ("" if stderr else LINE)
    assert seconds < 10
    if log == "host.log":
        assert path.read_text() == f"earlier\n{LINE}"


def test_a_full_stdout_and_a_lock_of_the_main_thread_hinder_no_end() -> None:
    code, errors, seconds = run(
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
    code, errors, _ = run("here.cause = 'host 2 failed: no luck'\nfrom_a_thread(end_process, 'lost host 0')")
    assert (code, errors) == (3, "LockstepError: host 2 failed: no luck (seen by host 0, in stage rollout)\n")


def test_an_error_of_another_thread_is_printed_before_the_others_hear_of_it() -> None:
    code, errors, _ = run(
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
    "nothing": "pass",
}


@pytest.mark.parametrize("waiting", WAITING)
def test_a_failing_process_leaves_its_threads_behind(waiting: str) -> None:
    """Such as those of Orbax, which wait for other hosts."""
    code, errors, seconds = run(
        f"""
        ending.LEAVING_SECONDS = 1.0
        {WAITING[waiting]}
        here.leaving_with = 2
        leave_when_done()
        raise KeyError("a bug")
        """
    )
    assert code == 2
    assert errors.endswith("KeyError: 'a bug'\n")
    assert seconds < 10


def test_a_failing_process_leaves_without_a_reader_of_its_error() -> None:
    code, _, seconds = run(
        """
        ending.LEAVING_SECONDS = 1.0
        here.leaving_with = 2
        leave_when_done()
        full(2)
        raise KeyError("a bug")
        """
    )
    assert code == 2
    assert seconds < 10


def test_an_end_that_others_notice_waits_for_the_error_of_the_main_thread() -> None:
    code, errors, seconds = run(
        """
        here.leaving_with = 2
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
