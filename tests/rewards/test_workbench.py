"""Rewards are tried on a file of completions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu_grpo.cli.rewards import main
from tpu_grpo.config import RewardSpec
from tpu_grpo.observe.json_lines import encode_line
from tpu_grpo.records.errors import DataError
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


def test_separators_within_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    """A run writes samples.jsonl in UTF-8, in which JSON leaves U+2028 and U+0085 as they are."""
    path, texts = tmp_path / "c.jsonl", ("a\u2028b\x85c", "d")
    path.write_bytes(b"\r\n".join(encode_line({"completion": text}).rstrip() for text in texts))
    assert read_completions(path).texts == texts


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
    np.testing.assert_array_equal(trial.scores.total, [1.0, 2.0, np.nan, np.nan])  # the second group went without
    assert trial.scores.figures["rewards/f/errors"].value == 2
    (failure,) = trial.failures
    assert (failure.reward, failure.rows) == ("f", (2,))  # row 3 went without, too, but does not raise on its own
    assert "reward f raised ValueError: could not convert string to float: 'x'" in failure.text


def test_prompts_may_be_messages(tmp_path: Path):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    path = write(tmp_path / "c.jsonl", [{"prompt": chat, "completion": "4"}, {"prompt": "2+3?", "completion": "5"}])
    (tmp_path / "mine.py").write_text("def f(prompts, completions):\n    return [float(len(p)) for p in prompts]\n")
    as_messages, as_text = (
        try_rewards(
            [RewardSpec(name=f"{tmp_path}/mine.py:f", messages=messages)], path, slowest=0
        ).scores.total.tolist()
        for messages in (True, False)
    )
    assert (as_messages, as_text) == ([2.0, 1.0], [4.0, 4.0])  # messages; letters of what the user says


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"c\.jsonl must hold a completion per line, got none"),
        ("{", r"c\.jsonl:1 must be one JSON object per line, got '\{'"),
        ('{"prompt": "x"}', r"c\.jsonl:1 must hold completion, a text, or completions, a list of texts"),
        ('{"completion": 5}', r"c\.jsonl:1 must hold completion"),
        ("[]", r"c\.jsonl:1 must hold completion"),
        (
            '{"completion": "x", "prompt": ["y"]}',
            r"c\.jsonl:1: prompt must be a text or a list of messages .*got \['y'\]",
        ),
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


@pytest.mark.full
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


def test_the_command_exits_with_1_and_names_the_rows_when_a_reward_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    source = """
from tpu_grpo.rewards import per_sample

@per_sample
def number(completion):
    return None if completion == "none" else float(completion)

def first_letter(completions):
    return [float(completion[0]["content"]) for completion in completions]
"""
    (tmp_path / "mine.py").write_text(source)
    config = tmp_path / "config.yaml"
    config.write_text(f"rewards: [{{name: '{tmp_path}/mine.py:number', workers: 0}}]\n")
    path = write(tmp_path / "c.jsonl", [{"completion": text} for text in ("1", "one", "none", "two")])
    assert main([str(config), "--completions", str(path)]) == 1
    shown, errors = capsys.readouterr()
    assert "number failed on 2 of 4 rows: 1, 3\n" in errors
    assert "ValueError: could not convert string to float: 'two' (" in errors
    assert "for row 3 (prompt '', completion 'two'). Return None for rows" in errors
    assert "│ 2   │ -      │ -     │ none" in shown
    of_batch = f"rewards=[{{name: '{tmp_path}/mine.py:first_letter', workers: 0}}]"
    assert main([str(config), "--completions", str(path), of_batch, "--show", "0"]) == 1
    errors = capsys.readouterr().err
    assert "first_letter failed on 4 of 4 rows: 0, 1, 2, 3\n" in errors
    assert "set messages: true for this reward; for row 1 (prompt '', completion 'one')" in errors
    together = "def two(completions):\n    return [1 / (len(completions) == 1)] * len(completions)\n"
    (tmp_path / "mine.py").write_text(source + together)
    assert main([str(config), "--completions", str(path), of_batch.replace("first_letter", "two"), "--show", "0"]) == 1
    errors = capsys.readouterr().err
    assert "two failed on 4 of 4 rows: 0, 1, 2, 3\n" in errors
    assert "ZeroDivisionError: division by zero" in errors
    assert "for 4 rows from 0 to 3" in errors
    assert "on its own" not in errors
    fine = write(tmp_path / "fine.jsonl", [{"completion": "1"}, {"completion": "none"}])
    assert main([str(config), "--completions", str(fine)]) == 0
    assert capsys.readouterr().err == ""
