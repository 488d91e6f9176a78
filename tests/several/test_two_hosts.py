"""The one run of two hosts among the default tests: lockstep, a host that is killed, and the same results after it."""

from pathlib import Path

import pytest

from tests.several.runs import SOON, completed, lines, outcome, run_hosts, settings


@pytest.mark.timeout(600)
def test_two_hosts_end_as_one_does_after_one_of_them_was_killed(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler's only replica spans both hosts."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # compiles sooner
    one, two = tmp_path / "one", tmp_path / "two"
    common = {"checkpoint": {"every": 1}, "meshes": {"sampler": {"tensor": 2}}}
    completed(1, 2, files, settings(one, **common))
    killed = run_hosts(2, 1, files, settings(two, **common, **SOON), fault="lost:SIGKILL,rollout of step 2")
    assert "LockstepError: lost host 1: " in killed.of_host(0), killed.errors
    assert "host 0 ended with exit code 3" in killed.errors
    assert "continuing after step 1" in completed(2, 1, files, settings(two, **common)).out
    assert outcome(two) == outcome(one)
    assert [line["step"] for line in lines(two)] == [1, 2]
