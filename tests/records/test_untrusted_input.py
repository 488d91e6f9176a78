"""Whatever lies where a file should be, reading it ends, by an exception that every reader knows."""

import json
import os
import signal
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.records.errors import DataError
from tpu_grpo.records.untrusted_input import DEEPEST, bounded, lines_of, open_file, parse_json, read_file


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("pipe", "zeros", "directory", "file", "link")}
    os.mkfifo(found["pipe"])
    found["zeros"].symlink_to("/dev/zero")
    found["directory"].mkdir()
    found["file"].write_bytes(b"a\nbc\n")
    found["link"].symlink_to("file")
    return found


@pytest.mark.parametrize("name", ["pipe", "zeros", "directory"])
def test_what_is_no_file_is_refused_without_waiting(places: dict[str, Path], name: str) -> None:
    for read in (open_file, read_file):
        with pytest.raises(OSError, match="regular file"):
            read(places[name])


def test_a_file_is_read_as_far_as_it_may_be_large(places: dict[str, Path]) -> None:
    assert read_file(places["link"], 5) == b"a\nbc\n"
    with pytest.raises(OSError, match="at most 4 bytes"):
        read_file(places["file"], 4)
    with open_file(places["file"]) as file:
        assert list(lines_of(file, "f", 3)) == [b"a\n", b"bc\n"]
    with open_file(places["file"]) as file, pytest.raises(DataError, match="f:2 must have less than 2 characters"):
        list(lines_of(file, "f", 2))


def test_a_file_that_does_not_say_its_size_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of /proc, which say 0 bytes."""
    (tmp_path / "file").write_bytes(b"ab" * 2**20)
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result((os.stat(file).st_mode, *[0] * 9)))
    assert read_file(tmp_path / "file") == b"ab" * 2**20
    with pytest.raises(OSError, match="at most 2097151 bytes"):
        read_file(tmp_path / "file", 2**21 - 1)


def test_a_small_file_takes_little_memory(places: dict[str, Path]) -> None:
    tracemalloc.start()
    try:
        assert read_file(places["file"]) == b"a\nbc\n"
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[" * 50_000, "more than 100 levels"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "more than 100 levels"),
        ('{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1), "more than 100 levels"),
        ("1" * 10_000, "digits"),
        (r'{"a": ["\ud800"]}', r"half of a surrogate pair \('\\ud800'\)"),
        (r'{"\udfff": 1}', "half of a surrogate pair"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_cannot_be_used_is_refused_in_one_way(text: str, wrong: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(json.JSONDecodeError, match=wrong):
            parse_json(form, whole=True)


@pytest.mark.parametrize(
    "value", [[[]] * 1000, {"a": [{"b": 1}] * 200}, json.loads("[" * DEEPEST + "]" * DEEPEST), "\U0001f600", 10**400]
)
def test_json_that_can_be_used_is_read(value: Any) -> None:
    assert parse_json(json.dumps(value), whole=True) == value


def test_half_of_a_surrogate_pair_may_stand_in_what_a_run_wrote() -> None:
    assert parse_json(r'"\ud800"') == "\ud800"


def test_a_block_is_bounded_in_time_and_memory_and_leaves_no_trace() -> None:
    before, (timer, _) = (
        signal.getsignal(signal.SIGALRM),
        signal.getitimer(signal.ITIMER_REAL),
    )  # those of pytest-timeout
    began = time.monotonic()
    with pytest.raises(TimeoutError), bounded(0.2):
        while True:
            pass
    assert time.monotonic() - began < 5.0
    with pytest.raises(MemoryError), bounded(10.0, 2**28):
        _ = "x" * 10**11
    with bounded(0.05, 2**28):
        assert len("x" * 10**6) == 10**6
    assert signal.getsignal(signal.SIGALRM) is before
    assert timer - 5.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= timer
    assert len(bytes(2**29)) == 2**29
