"""Whole runs with an update that is not finite: how they end, and that skipping it changes no bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import Ended, lines, outcome, run_hosts, settings

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(1500)]

REWARD = """
from tpu_grpo.rewards import per_token

@per_token
def bursts(completions, completion_ids, step):
    return [[1e30 if step == 2 else 0.0] * len(ids) for ids in completion_ids]
"""
"""Gradients of step 2 are too large for float32."""


def run(hosts: int, files: Path, run_dir: Path, update: dict[str, Any]) -> Ended:
    rewards = [{"name": "rewards.py:ascii_share", "workers": 0}, {"name": "bursts.py:bursts", "workers": 0}]
    tree = settings(run_dir, run={"max_steps": 3}, rewards=rewards, update=update, checkpoint={"every": 1})
    return run_hosts(hosts, 4 // hosts, files, tree)


def test_a_run_ends_and_goes_on(files: Path, tmp_path: Path) -> None:
    (files / "bursts.py").write_text(REWARD)
    one, two = tmp_path / "one", tmp_path / "two"
    ended = run(2, files, two, {})
    assert ended.code == 1, ended.errors
    for host in range(2):
        own = ended.of_host(host)
        assert (
            "NonFiniteError: the gradient norm of step 2 must be finite, got inf; the largest advantage, 1e+30" in own
        )
        assert "; nothing of it reached the policy. Continue from the last checkpoint" in own
    assert len(lines(two)) == 1
    report = (two / "report.html").read_text()
    assert "The run failed after step 1 of " in report
    assert "NonFiniteError: the gradient norm of step 2 must be finite, got inf" in report

    for hosts, run_dir in ((2, two), (1, one)):
        ended = run(hosts, files, run_dir, {"on_non_finite": "skip"})
        assert ended.code == 0, ended.errors
        assert "the update was skipped, and nothing of it reached the policy" in ended.out + ended.errors
        steps = lines(run_dir)
        assert [step["update/skipped"] for step in steps] == [0, 1, 0]
        assert steps[1]["update/grad_norm"] is None
        assert (run_dir / "report.html").is_file()
    assert outcome(two) == outcome(one)
