"""The one run of two hosts among the default tests: lockstep, a host that is killed, and the same results after it."""

from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import SOON, completed, lines, outcome, run_hosts, settings


@pytest.mark.timeout(600)
def test_two_hosts_end_as_one_does_after_one_of_them_was_killed(files: Path, tmp_path: Path) -> None:
    """The sampler's only replica spans both hosts. One process, with as many devices, goes on after them."""
    one, two = tmp_path / "one", tmp_path / "two"
    common: dict[str, Any] = {"checkpoint": {"every": 1}, "meshes": {"sampler": {"tensor": 4}}}
    killed = run_hosts(2, 2, files, settings(two, **common, **SOON), fault="lost:SIGKILL,rollout of step 2")
    assert "LockstepError: lost host 1: " in killed.of_host(0), killed.errors
    assert "host 0 ended with exit code 3" in killed.errors
    assert [line["step"] for line in lines(two)] == [1]
    for run_dir in (one, two):
        completed(1, 4, files, settings(run_dir, **common))
    assert outcome(two) == outcome(one)
    assert [line["step"] for line in lines(two)] == [1, 2]
