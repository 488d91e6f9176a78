"""Rewards are tried on a file of completions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.config import RewardSpec
from tpu_grpo.errors import DataError
from tpu_grpo.rewards.workbench import Disagreement, read_completions, try_rewards

SCRIPT = Path(__file__).parents[2] / "scripts" / "rewards.py"
RECORDS = [
    {"prompt": "2+2?", "completion": "#### 4", "answer": "4"},
    {"prompt": "2+3?", "completion": "it is 5", "answer": "5"},
    {"prompt": "2+4?", "completion": "#### 7", "answer": "6"},
]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_scores_slowest_and_disagreements(tmp_path: Path):
    source = """
import time

def slow(completions):
    time.sleep(0.2 * sum("5" in c for c in completions))
    return [1.0] * len(completions)
"""
    (tmp_path / "mine.py").write_text(source)
    specs = [RewardSpec(name="gsm8k"), RewardSpec(name="format"), RewardSpec(name=f"{tmp_path}/mine.py:slow", weight=0)]
    trial = try_rewards(specs, write(tmp_path / "c.jsonl", RECORDS), slowest=2)
    assert trial.scores.total.tolist() == [2.0, 1.0, 1.0]
    assert (trial.slowest[0].reward, trial.slowest[0].row) == ("slow", 1)
    assert trial.slowest[0].seconds >= 0.2
    assert trial.disagreements == (
        Disagreement("gsm8k", "format", (1, 2), 3),
        Disagreement("gsm8k", "slow", (2,), 3),
        Disagreement("format", "slow", (1,), 3),
    )


def test_groups_and_problems(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def f(completions):\n    return [float(c) for c in completions]\n")
    path = write(tmp_path / "c.jsonl", [{"completions": ["1", "2"]}, {"completions": ["x", "3"]}])
    trial = try_rewards([RewardSpec(name=f"{tmp_path}/mine.py:f", workers=2)], path)
    assert trial.rollout.group_size == 2
    assert trial.scores.total.tolist() == [1.0, 2.0, 0.0, 0.0]  # the second group went without
    assert trial.scores.figures["rewards/f/errors"].value == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"c\.jsonl must hold a completion per line, got none"),
        ("{", r"c\.jsonl:1 must be one JSON object per line, got '\{'"),
        ('{"prompt": "x"}', r"c\.jsonl:1 must hold completion, a text, or completions, a list of texts"),
        ('{"completion": 5}', r"c\.jsonl:1 must hold completion"),
        ("[]", r"c\.jsonl:1 must hold completion"),
        (
            '{"completions": ["a"]}\n{"completions": ["a", "b"]}',
            r"every line must hold as many completions, got \[1, 2\]",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, message: str):
    (tmp_path / "c.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_completions(tmp_path / "c.jsonl")


def test_the_command(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text("rewards: [{name: gsm8k}, {name: format, weight: 0.5}]\n")
    path = write(tmp_path / "c.jsonl", RECORDS)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)

    done = run(str(config), "--completions", str(path))
    assert done.returncode == 0, done.stderr
    assert "gsm8k and format disagree on 2 of 3" in done.stdout
    wrong = run(str(config), "--completions", str(path), "rewards=[{name: gsm8}]")
    assert wrong.returncode == 2
    assert "did you mean gsm8k?" in wrong.stderr
