"""Tokens drawn under filters, and per-token rewards, on several processes: tokens and parameters of one."""

from pathlib import Path

import pytest

from tests.several.runs import completed, lines, outcome, settings

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(900)]

REWARD = """
from tpu_grpo.rewards import per_token

@per_token
def even_ids(completions, completion_ids):
    return [[0.5 if token % 2 == 0 else -0.5 for token in ids] for ids in completion_ids]
"""


def test_two_processes_sample_and_learn_what_one_does(files: Path, tmp_path: Path) -> None:
    (files / "tokens.py").write_text(REWARD)
    sections = {
        "rollout": {"top_k": 20, "top_p": 0.95, "min_p": 0.01},
        "algorithm": {"filtered_ratio": True, "old_policy": "trainer", "iterations": 2},
        "logging": {"samples_every": 1},
        "rewards": [{"name": "rewards.py:ascii_share", "workers": 0}, {"name": "tokens.py:even_ids", "workers": 1}],
    }
    one, two = tmp_path / "one", tmp_path / "two"
    for hosts, run_dir in ((1, one), (2, two)):
        completed(hosts, 4 // hosts, files, settings(run_dir, run={"max_steps": 3}, **sections))
    assert outcome(two) == outcome(one)
    assert len(set(outcome(one)[0])) == 3
    for name in ("rewards/even_ids/mean", "rewards/mean", "agreement/logprob_abs_diff_max"):
        values = [[line[name] for line in lines(run_dir)] for run_dir in (one, two)]
        assert values[0] == values[1], name
        assert name.startswith("rewards") or max(values[0]) <= 1e-4
    assert (one / "samples.jsonl").read_text() == (two / "samples.jsonl").read_text()
