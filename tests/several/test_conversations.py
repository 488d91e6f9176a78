"""Conversations on 1, 2 and 4 processes, with environments that answer after random delays: the same tokens."""

from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import completed, lines, outcome, settings
from tests.talking import AGENT_SETTINGS, SIZES, write_talking_files

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_files(tmp_path_factory.mktemp("talking"), layers=1)


def tree(run_dir: Path, **sections: Any) -> dict[str, Any]:
    return settings(run_dir, **{"run": {"max_steps": 3}, **SIZES, **sections})


@pytest.mark.parametrize(("hosts", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_replicas_within_hosts_say_what_those_of_one_process_do(
    talking: Path, tmp_path: Path, hosts: int, devices: int
) -> None:
    """Each host has a replica."""
    one, several, options = tmp_path / "one", tmp_path / "several", f"meshes.sampler.tensor={devices}"
    completed(1, 4, talking, tree(one), options)
    completed(hosts, devices, talking, tree(several), options)
    assert outcome(several) == outcome(one)
    for line, other in zip(lines(several), lines(one), strict=True):
        assert line["episodes/turns_mean"] == other["episodes/turns_mean"] > 1.5
        assert line["rewards/mean"] == other["rewards/mean"]
        assert line["agreement/logprob_abs_diff_max"] <= 1e-4
        assert line["agreement/logprob_abs_diff_mean"] <= 1e-5


def test_a_replica_over_hosts_says_the_same(talking: Path, tmp_path: Path) -> None:
    """Each host has the environments of some rows, and sends their next turns to the other host.

    The engine has int8 weights, which each host makes of its shards.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    options = "meshes.sampler.tensor=4", "rollout.weights_dtype=int8", "run.max_steps=2"
    completed(1, 4, talking, tree(one), *options)
    completed(2, 2, talking, tree(two), *options)
    assert outcome(one)[0] == outcome(two)[0]


@pytest.mark.slow
def test_agents_are_told_the_same_on_every_number_of_hosts(talking: Path, tmp_path: Path) -> None:
    """Four replicas in one process and in two processes, then one replica over two hosts with an agent on each."""
    found = []
    for name, hosts, tensor in (("one", 1, 1), ("two", 2, 1), ("whole", 1, 4), ("over", 2, 4)):
        sections = {"environment": AGENT_SETTINGS, "meshes": {"sampler": {"tensor": tensor}}}
        completed(hosts, 4 // hosts, talking, tree(tmp_path / name, **sections))
        found.append(outcome(tmp_path / name))
    assert found[0] == found[1]
    assert found[2][0] == found[3][0]
