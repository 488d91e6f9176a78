"""The start of a run says what it does, on host 0, and counts what takes long."""

import importlib
import re
import time

import pytest

from tpu_grpo.hosts import Hosts, announce, counted, with_reminders
from tpu_grpo.hosts.host_log import BEGAN


def test_host_0_speaks_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    announce(Hosts(), "checking the data")
    other = Hosts()
    other.index = 1
    announce(other, "checking the data")
    assert re.fullmatch(r"\[ *\d+\.\d s\] checking the data\n", capsys.readouterr().err)


def test_what_is_counted_is_said_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [BEGAN]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with counted(Hosts(), "compiling") as tell:
        for _ in range(5):
            clock[0] += 2.0  # said again after 6 seconds, and not before
            tell()
    assert capsys.readouterr().err == "[   0.0 s] compiling\n[   6.0 s] compiling: 3 done\n"


def test_a_stage_that_prints_nothing_is_said_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("tpu_grpo.hosts.host_log"), "SILENT_SECONDS", 0.05)
    with with_reminders(Hosts()) as compiled:
        announce(Hosts(), "loading 5 parameters")
        time.sleep(0.4)
        compiled()
        time.sleep(0.1)
        said = capsys.readouterr().err.splitlines()
        time.sleep(0.2)
    assert said[0].endswith("] loading 5 parameters")
    assert 2 <= len(said) <= 9
    assert {line.partition("] ")[2] for line in said[1:]} == {"loading 5 parameters: not finished yet"}
    assert capsys.readouterr().err == ""
