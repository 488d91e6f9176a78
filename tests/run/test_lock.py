"""A directory has one owner at a time; whoever was killed is recognised, on this machine and on another."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run import lock as lock_module
from tpu_grpo.run.lock import Owner, RunLock, holder, read_owner

HOLD = """
import sys, time
from pathlib import Path
from tpu_grpo.run.lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print(lock.owner.process, flush=True)
{then}
"""


@contextmanager
def other_process(directory: Path, then: str = "time.sleep(100)") -> Iterator[subprocess.Popen[str]]:
    """A process that has the directory."""
    command = [sys.executable, "-c", HOLD.format(then=then), str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        yield process
    finally:
        process.kill()
        process.communicate()


def record(directory: Path, owner: Owner) -> Path:
    """What a process that was killed leaves."""
    path = directory / "run.lock"
    path.write_text(json.dumps(asdict(owner)).ljust(511) + "\n")
    return path


@pytest.fixture
def elsewhere(tmp_path: Path) -> Owner:
    """A process on another machine."""
    lock = RunLock.take(tmp_path)
    lock.release()
    return replace(lock.owner, host="far", process=1, boot="another", token="a" * 32)


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)


def take(directory: Path, seconds: float = 0.5) -> RunLock:
    with patch.multiple(lock_module, SILENT_SECONDS=seconds, BEAT_SECONDS=0.05):
        return RunLock.take(directory)


def test_a_lock_names_its_process_and_leaves_nothing(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path)
    owner = read_owner(tmp_path / "run.lock")
    assert owner is not None
    assert owner == lock.owner
    assert (owner.host, owner.process) == (socket.gethostname(), os.getpid())
    assert abs(owner.began - psutil.Process().create_time()) < 1
    assert holder(tmp_path) == owner
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"):  # also for this process
        RunLock.take(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    assert holder(tmp_path) is None


def test_a_live_process_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        path = tmp_path / "run.lock"
        before = (path.read_bytes(), path.stat().st_mtime_ns, tmp_path.stat().st_mtime_ns)
        with pytest.raises(ConfigError) as caught:
            RunLock.take(tmp_path)
        owner = holder(tmp_path)
        assert owner is not None
        assert str(caught.value) == (
            f"run.dir must have one run at a time; {tmp_path} is in use by process {process.pid} on host "
            f"{socket.gethostname()} since {owner.since}: wait until that run has ended, stop it, or give this one "
            f"another run.name or run.dir; if you know that the process is gone, remove {path}"
        )
        assert (path.read_bytes(), path.stat().st_mtime_ns, tmp_path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("then", ["time.sleep(100)", "import os; os._exit(1)"])
def test_what_a_killed_process_leaves_is_taken_over_at_once(tmp_path: Path, then: str) -> None:
    with other_process(tmp_path, then) as process:
        if "sleep" in then:
            process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "run.lock").exists()
        assert holder(tmp_path) is None
        began = time.monotonic()
        lock = RunLock.take(tmp_path)
        assert time.monotonic() - began < 1
        assert lock.owner.process == os.getpid()
        lock.release()


def test_a_child_that_outlives_its_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    then = "import subprocess; subprocess.Popen(['sleep', '20'], stdout=subprocess.DEVNULL); time.sleep(100)"
    with other_process(tmp_path, then) as process:
        while not (children := psutil.Process(process.pid).children()):
            time.sleep(0.01)
        process.kill()
        process.wait()
        RunLock.take(tmp_path).release()
        children[0].kill()


def test_without_locks_the_process_decides(tmp_path: Path, no_flock: None) -> None:
    with other_process(tmp_path) as process:
        with pytest.raises(ConfigError, match=f"in use by process {process.pid} on"):
            take(tmp_path)
        assert holder(tmp_path) is not None
        process.kill()
        process.wait()
        assert holder(tmp_path) is None
        take(tmp_path).release()


def test_without_locks_a_process_id_that_was_given_again_does_not_count(tmp_path: Path, no_flock: None) -> None:
    lock = take(tmp_path)
    lock.release()
    record(tmp_path, replace(lock.owner, began=lock.owner.began - 100))
    take(tmp_path).release()


def test_another_machine_that_gives_signs_is_left_alone(tmp_path: Path, elsewhere: Owner) -> None:
    path = record(tmp_path, elsewhere)
    threading.Timer(0.3, lambda: record(tmp_path, replace(elsewhere, beat=1))).start()
    with pytest.raises(ConfigError, match="in use by process 1 on host far since"):
        take(tmp_path, seconds=5)
    assert read_owner(path) == replace(elsewhere, beat=1)
    assert holder(tmp_path, guess=True) == replace(elsewhere, beat=1)
    assert holder(tmp_path) is None


def test_another_machine_that_is_silent_is_taken_over_after_a_wait(
    tmp_path: Path, elsewhere: Owner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock_module, "SETTLE_SECONDS", 0.1)
    path = record(tmp_path, elsewhere)
    began = time.monotonic()
    lock = take(tmp_path)
    assert 0.5 <= time.monotonic() - began < 2
    assert read_owner(path) == lock.owner
    told = f"{path} names {elsewhere}; looking for up to 0.5 s whether that process still lives\n"
    assert capsys.readouterr().err == told
    lock.release()


def test_an_old_file_is_not_watched(tmp_path: Path, elsewhere: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "SETTLE_SECONDS", 0.1)
    path = record(tmp_path, elsewhere)
    os.utime(path, (time.time() - 2000, time.time() - 2000))
    assert holder(tmp_path, guess=True) is None
    began = time.monotonic()
    take(tmp_path, seconds=100).release()
    assert time.monotonic() - began < 2


def test_of_two_that_come_for_the_same_one_goes_on(
    tmp_path: Path, elsewhere: Owner, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "SETTLE_SECONDS", 0.5)
    record(tmp_path, elsewhere)
    rival = replace(elsewhere, host="third", token="b" * 32)
    threading.Timer(0.8, lambda: record(tmp_path, rival)).start()  # after this process has written its own
    with pytest.raises(ConfigError, match="on host third"):
        take(tmp_path, seconds=0.5)


def test_signs_of_life_are_given(tmp_path: Path) -> None:
    lock = take(tmp_path)
    deadline = time.monotonic() + 5
    while (owner := read_owner(tmp_path / "run.lock")) is None or owner.beat < 3:
        assert time.monotonic() < deadline
    lock.release()


def test_an_owner_that_was_taken_for_dead_ends(tmp_path: Path, elsewhere: Owner) -> None:
    """Stopped for long, it may find that another has the directory; two must not write there."""
    then = "lock.stop_beating(); lock._stop.clear(); lock._every = 0.1; lock._keep_beating(); time.sleep(100)"
    with other_process(tmp_path, then) as process:
        record(tmp_path, elsewhere)
        assert process.wait(20) == 3


def test_a_torn_record_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text('{"host": "x')
    RunLock.take(tmp_path).release()
    (tmp_path / "run.lock").write_text("")
    assert holder(tmp_path) is None


@pytest.mark.parametrize("kind", ["link", "hard link", "directory", "pipe"])
def test_nothing_but_a_file_of_its_own_is_a_lock(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "run.lock", tmp_path / "somebody's file"
    target.write_text("precious")
    match kind:
        case "link":
            path.symlink_to(target)
        case "hard link":
            path.hardlink_to(target)
        case "directory":
            path.mkdir()
        case _:
            os.mkfifo(path)
    for look in (RunLock.take, holder):
        with pytest.raises(ConfigError, match=r"run\.dir must hold a file of its own as run\.lock, got a link"):
            look(tmp_path)
    assert target.read_text() == "precious"
