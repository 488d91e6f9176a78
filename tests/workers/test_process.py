"""Processes of users' code, as the main process sees them."""

import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tpu_grpo.workers.process import WorkerProcess, environment_of


def test_a_process_that_cannot_be_started_leaves_no_files_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no such program")

    monkeypatch.setattr(subprocess, "Popen", refused)
    before = os.listdir("/proc/self/fd")
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(OSError, match="no such program"):
        WorkerProcess("pass", theirs, tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_a_process_that_has_just_been_started_is_told_by_its_environment() -> None:
    """Popen returns before the kernel has put the environment in its place; most of these would be missed."""
    for number in range(100):
        with subprocess.Popen(["sleep", "60"], env={"NUMBER": str(number)}) as started:
            found = environment_of(psutil.Process(started.pid))
            started.kill()
        assert found == {"NUMBER": str(number)}


def test_a_worker_gets_those_secrets_of_the_environment_that_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {
        "HF_TOKEN": "1",
        "WANDB_API_KEY": "2",
        "AWS_SECRET_ACCESS_KEY": "3",
        "GOOGLE_APPLICATION_CREDENTIALS": "/4",
        "MY_API_KEY": "5",
        "https_proxy": "http://me:6@proxy:3128",
        "TOKENIZERS_PARALLELISM": "false",
        "TPU_GRPO_CACHE": "/cache",
        "TPU_WORKER_ID": "0",
        "MY_SETTING": "https://example.org:80/",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ours, theirs = socket.socketpair()
    with ours:
        process = WorkerProcess("import time; time.sleep(60)", theirs, tmp_path, ("MY_API_KEY",))
        found = environment_of(psutil.Process(process._process.pid))
        process.kill()
    assert {*given} & {*found} == {"MY_API_KEY", "TOKENIZERS_PARALLELISM", "TPU_GRPO_CACHE", "MY_SETTING"}


def test_a_process_may_have_no_environment() -> None:
    with subprocess.Popen(["sleep", "60"], env={}) as started:
        assert environment_of(psutil.Process(started.pid)) == {}
        started.kill()
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
        assert environment_of(psutil.Process(started.pid)) == {}  # a zombie's
