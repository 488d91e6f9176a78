"""Processes of users' code, as the main process sees them."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tpu_grpo.workers.process import WorkerProcess


def test_a_process_that_cannot_be_started_leaves_no_files_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no such program")

    monkeypatch.setattr(subprocess, "Popen", refused)
    before = os.listdir("/proc/self/fd")
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(OSError, match="no such program"):
        WorkerProcess("pass", theirs, tmp_path)
    assert os.listdir("/proc/self/fd") == before
