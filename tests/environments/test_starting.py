"""Processes that import an environment's class end, or take long, before they are ready."""

import re
from types import SimpleNamespace

import pytest

from tests.environments.playing import begun, open_pool, told
from tpu_grpo.environments.environment_classes import load_environment
from tpu_grpo.environments.environment_worker import EnvironmentService
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.workers import supervisor
from tpu_grpo.workers.supervisor import StartError, Starting

SERVICE = EnvironmentService(load_environment("tests.environments.games:Counter", {}), keep=False)


@pytest.mark.full
@pytest.mark.parametrize("name", ["Silent", "SilentAsync"])
def test_an_import_that_succeeds_once_and_never_again_ends_the_run(monkeypatch: pytest.MonkeyPatch, name: str):
    said = f"environment {name} must be imported in each of its processes, which it was at first, got 3 in a row that "
    with open_pool(f"tests.environments.faulty:{name}") as pool:
        assert told(begun(pool)) == "begin"
        monkeypatch.setenv("FAULTY_IMPORT", "leaves")
        (first,) = pool.groups[""].servers
        first.process._process.kill()
        with pytest.raises(EpisodeError, match=re.escape(f"{said}ended before, and the last exited with code 7; see")):
            while True:
                pool.ready(0)
                pool._pump(0.05)


def test_only_processes_in_a_row_count():
    processes = Starting(SERVICE)
    processes.ready()
    for _ in range(3):
        assert processes.failed("exited with code 1") is None
        assert processes.failed("exited with code 1") is None
        processes.ready()


def test_each_process_has_its_time_from_when_a_conversation_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    processes = Starting(SERVICE)
    processes.ready()
    now = 1000.0
    processes.waited_for()
    now = 1120.0
    processes.waited_for()
    processes.failed("exited with code 1")
    now = 2000.0
    processes.waited_for()
    now = 2120.1
    with pytest.raises(StartError, match="must be imported in its process within 120 s, got no answer"):
        processes.waited_for()
