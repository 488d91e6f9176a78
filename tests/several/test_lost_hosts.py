"""A host that is killed, frozen, failing or slow in any stage of a run, and what the others do."""

from pathlib import Path
from typing import Any

import pytest

from tests.several import runs
from tests.several.runs import completed, run_hosts, seconds_since_last_stage

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(300)]

FAILS = """
import sys

def fails(completions):
    if "hosts.index=1" in sys.argv:
        raise ValueError("no luck")
    return [0.0] * len(completions)
"""
STAGES = ["rollout of step 2", "launch 3", "rewards of step 2", "update of step 2", "weight sync of step 2"]
LOST_SECONDS = 12
"""The seconds after which a silent host counts as lost in these runs; the default is longer."""


def settings(run_dir: Path, **sections: Any) -> dict[str, Any]:
    hosts = {"lost_timeout_seconds": LOST_SECONDS, "start_timeout_seconds": 60}
    return runs.settings(run_dir, hosts=hosts, **sections)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_a_host_lost_in_a_stage_is_named_by_the_others(
    files: Path, tmp_path: Path, number: str, stage: str, tensor: int
) -> None:
    tree = settings(tmp_path, meshes={"sampler": {"tensor": tensor}})
    ended = run_hosts(2, 2, files, tree, fault=f"lost:{number},{stage}", grace=25)
    own = ended.of_host(0)
    assert "LockstepError: lost host 1: " in own, own
    assert "(seen by host 0, in stage " in own
    assert "host 0 ended with exit code 3" in ended.errors
    assert seconds_since_last_stage(tmp_path) < LOST_SECONDS + 15
    report = (tmp_path / "report.html").read_text()
    assert "The run failed after step 1 of 2" in report
    assert "LockstepError: lost host 1: " in report


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_host_lost_where_groups_are_dealt_again_is_named(files: Path, tmp_path: Path, number: str) -> None:
    """Four replicas with room for 4 rows sample eight groups of 4 rows, so that the second half of the groups waits."""
    tree = settings(tmp_path, rollout={"max_new_tokens": 40, "max_running_requests": 4, "batch_paddings": [4]})
    tree["data"]["prompts_per_step"] = 8
    ended = run_hosts(2, 2, files, tree, fault=f"lost:{number},point 1", grace=25)
    own = ended.of_host(0)
    assert "LockstepError: lost host 1: " in own, own
    assert "(seen by host 0, in stage rollout of step 1)" in own
    assert "host 0 ended with exit code 3" in ended.errors
    assert seconds_since_last_stage(tmp_path) < LOST_SECONDS + 15


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_host_lost_at_start_up_is_named(files: Path, tmp_path: Path, number: str) -> None:
    ended = run_hosts(
        2, 2, files, settings(tmp_path), "hosts.start_timeout_seconds=15", fault=f"lost:{number},start-up"
    )
    own = ended.of_host(0)
    assert "LockstepError: all 2 hosts must start within 15 s; host 1 did not come (this is host 0)" in own, own
    assert "host 0 ended with exit code 3" in ended.errors


def test_a_slow_host_is_waited_for(files: Path, tmp_path: Path) -> None:
    """The update of one host takes three times as long as a silent host is waited for."""
    tree = settings(tmp_path, run={"max_steps": 1})
    tree["hosts"]["lost_timeout_seconds"] = 4
    completed(2, 2, files, tree, fault="slow:12")


@pytest.mark.parametrize(
    ("tensor", "early", "stage"), [(1, False, "rewards of step 1"), (4, True, "rollout of step 1")]
)
def test_a_reward_that_fails_on_one_host_ends_all_with_its_name(
    files: Path, tmp_path: Path, tensor: int, early: bool, stage: str
) -> None:
    """The reward fails after the rollout, or during it, while both hosts drive one engine and groups end in turn."""
    (files / "failing.py").write_text(FAILS)
    rewards = [{"name": "failing.py:fails", "workers": 0, "early": early}]
    rollout = {"max_running_requests": 4, "batch_paddings": [4], "steps_per_launch": 1}
    tree = settings(tmp_path, rewards=rewards, rollout=rollout, meshes={"sampler": {"tensor": tensor}})
    ended = run_hosts(2, 2, files, tree)
    assert ended.code in (2, 3), ended.errors  # 2 on the host whose reward it is, 3 on the other
    assert "RewardError: reward fails raised ValueError: no luck" in ended.of_host(1)
    assert "LockstepError: host 1 failed: RewardError: reward fails raised" in ended.of_host(0)
    log = (tmp_path / "logs" / "host_1.log").read_text()
    assert f"{stage} begins" in log
    assert f"{stage} ends" not in log


def test_a_checkpoint_that_one_host_cannot_write_ends_all_and_the_run_goes_on_after_the_one_before(
    files: Path, tmp_path: Path
) -> None:
    """The hosts' heartbeats continue while Orbax's threads wait for each other."""
    tree = settings(tmp_path, run={"max_steps": 4}, checkpoint={"every": 1})
    ended = run_hosts(2, 2, files, tree, fault="limited:saving step 2")
    assert ended.code in (1, 3), ended.errors  # 1 on the host whose disk it is, 3 on the other
    message = f"the disk must take step 2 in {tmp_path}/checkpoints, got: File too large; have the limit on the size"
    assert f"DiskError: step 2 could not be saved: {message}" in ended.of_host(1)
    assert f"LockstepError: host 1 failed: DiskError: step 2 could not be saved: {message}" in ended.of_host(0)
    assert "Traceback" not in ended.errors
    assert seconds_since_last_stage(tmp_path) < LOST_SECONDS
    again = completed(2, 2, files, tree)
    assert "continuing after step 1" in again.out


HOLDS = """
import ctypes, os, sys

def leaves(completions):
    os._exit(0) if "hosts.index=1" in sys.argv and not os.path.exists("again") else None
    return [0.0] * len(completions)

def holds(completions):
    ctypes.PyDLL(None).sleep(300) if "hosts.index=1" in sys.argv else None
    return [0.0] * len(completions)
"""


def test_a_reward_that_ends_its_process_ends_the_others_and_the_next_start_says_so(files: Path, tmp_path: Path) -> None:
    (files / "ending.py").write_text(HOLDS)
    tree = settings(tmp_path, rewards=[{"name": "ending.py:leaves", "workers": 0}])
    ended = run_hosts(2, 2, files, tree)
    assert ended.code == 3, ended.errors
    assert "LockstepError: lost host 1: " in ended.of_host(0)
    (files / "again").touch()
    again = completed(2, 2, files, tree)
    assert "before, the run failed: LockstepError: lost host 1" in again.out


def test_a_reward_that_holds_the_interpreter_ends_its_host_and_the_others(files: Path, tmp_path: Path) -> None:
    (files / "ending.py").write_text(HOLDS)
    tree = settings(tmp_path, rewards=[{"name": "ending.py:holds", "workers": 0}])
    ended = run_hosts(2, 2, files, tree)
    assert "LockstepError: lost host 1: " in ended.of_host(0)
    assert "something has held the interpreter's lock of this host for too long" in ended.of_host(1)
    assert ended.seconds < 60
