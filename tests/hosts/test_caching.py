"""Compiled programs are kept on disk, whole, by every process, and a disk that fails is spoken of once."""

import errno
import inspect
import os
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from jax._src import compiler, lru_cache

from tpu_grpo.hosts import Hosts, caching, keep_programs
from tpu_grpo.hosts.caching import CHECKSUM_BYTES, ProgramCache, exclusive, programs_directory

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import jax, jax.monitoring
from jax._src import distributed
from tpu_grpo.hosts import Hosts, keep_programs
from tpu_grpo.observe.process_metrics import CompilationCounter

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
keep_programs(Hosts())
jax.devices()
distributed.global_state.process_id = 1  # of which jax alone would keep nothing
with CompilationCounter() as counter:
    result = jax.jit(lambda x: (x @ x.T).sum(0))(jax.numpy.linspace(0, 1, 12).reshape(3, 4))
print(counter.count, events.count("/jax/compilation_cache/cache_hits"), [float(x).hex() for x in result])
"""


@pytest.fixture
def cache(tmp_path: Path) -> ProgramCache:
    cache = ProgramCache(tmp_path / "programs")
    assert cache.open()
    return cache


@pytest.mark.full
def test_the_second_process_compiles_nothing_counts_the_same_and_computes_the_same(tmp_path: Path) -> None:
    environment = os.environ | {"TPU_GRPO_CACHE": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200, check=True
        )
        outputs.append(done.stdout.split(maxsplit=2))
        assert done.stderr == ""
    (count, hits, result), (count_again, hits_again, result_again) = outputs
    assert (hits, hits_again) == ("0", count)
    assert (count_again, result_again) == (count, result)
    kept = [path.read_bytes() for path in tmp_path.glob("programs/*/*")]
    assert len(kept) >= int(count) > 0
    assert [found[:CHECKSUM_BYTES] for found in kept] == [sha256(found[CHECKSUM_BYTES:]).digest() for found in kept]


def test_entries_are_found_again_and_leave_nothing_unfinished(cache: ProgramCache) -> None:
    assert cache.get("a") is None
    cache.put("a", b"program")
    assert cache.get("a") == b"program"
    assert [path.name for path in cache.directory.iterdir()] == ["a"]


def test_what_was_cut_off_is_not_a_program(cache: ProgramCache) -> None:
    cache.put("a", b"program")
    path = cache.directory / "a"
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.get("a") is None
    assert not path.exists()


def test_a_full_disk_is_spoken_of_once(
    cache: ProgramCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.put("a", b"program")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for key in ("b", "c"):
        cache.put(key, b"program")
    said = capsys.readouterr().err
    assert said.startswith(f"compiled programs cannot be kept in {cache.directory}: No space left on device; the run ")
    assert said.count("\n") == 1
    assert cache.get("a") == b"program"


def test_a_directory_that_cannot_be_made_is_spoken_of_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(caching, "_kind_of_device", lambda: "cpu")
    monkeypatch.setenv("TPU_GRPO_CACHE", str(tmp_path / "file"))
    keep_programs(Hosts())
    assert f"cannot be kept in {tmp_path}/file/programs/cpu: Not a directory" in capsys.readouterr().err


def test_programs_that_others_may_have_put_there_are_not_run(
    cache: ProgramCache, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    cache.directory.chmod(0o770)
    assert not ProgramCache(cache.directory).open()
    assert f"cannot be kept in {cache.directory}: others may write there; the run goes on" in capsys.readouterr().err
    cache.directory.chmod(0o755)  # as an earlier version, or mkdir, made it
    assert ProgramCache(cache.directory).open()
    assert cache.directory.stat().st_mode & 0o777 == 0o700


def test_what_was_not_used_for_longest_makes_room(cache: ProgramCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for time, key in enumerate(("old", "used", "new")):
        cache.put(key, b"x" * 68)  # 100 bytes with the checksum
        os.utime(cache.directory / key, (time, time))
    assert cache.get("used")
    monkeypatch.setattr(caching, "MOST_BYTES", 250)
    assert ProgramCache(cache.directory).open()
    assert sorted(path.name for path in cache.directory.iterdir()) == ["new", "used"]


def test_programs_of_other_threads_and_cpus_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_GRPO_CACHE", "/x")
    found = {programs_directory()}
    for name, value in (("NPROC", "17"), ("XLA_FLAGS", "--xla_force_host_platform_device_count=3")):
        monkeypatch.setenv(name, value)
        found.add(programs_directory())
    monkeypatch.setattr(caching, "_cpu", lambda: ["flags: avx1024"])
    found.add(programs_directory())
    assert len(found) == 4
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert programs_directory() == Path("/x/programs/accelerator")


@pytest.mark.parametrize(
    ("source", "reason"),
    [(compiler, "process_id != 0"), (lru_cache.LRUCache.put, "cache_path.write_bytes(value)")],
)
def test_jax_still_needs_the_change(source: Any, reason: str) -> None:
    assert reason in inspect.getsource(source)


def test_who_waits_for_a_lock_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(caching, "WAITING_SECONDS", 0.1)
    path, entered = tmp_path / "a lock", threading.Event()

    def wait() -> None:
        with exclusive(path):
            entered.set()

    with exclusive(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(0.5)
    waiting.join(5)
    assert entered.is_set()
    assert capsys.readouterr().err == f"waiting for another process of this machine, which has locked {path}\n"
