"""The command that lets models answer: what it refuses, and whole answers of a small random model."""

import re
from pathlib import Path

import numpy as np
import pytest

from tpu_grpo.cli.sample import answers_shown, main
from tpu_grpo.records.stages import Completion, Scores


@pytest.fixture(autouse=True)
def in_the_directory_of_the_run(unstarted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(unstarted)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.full
def test_rewards_are_shown_for_columns_and_for_records_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    given = told(capsys, "run@initial", "3+1=", "--rewards", "--column", "answer=4", "--temperature", "0")
    assert re.search(r"\nrewards: ascii_share [\d.]+, exact_answer 0; total [\d.]+\n$", given)
    rows = told(capsys, "run@initial", "--data", "--rows", "0,3", "--rewards", "--temperature", "0")
    assert [line for line in rows.splitlines() if line.startswith("=== ")] == [
        "=== 0+1=",
        "=== 3+1=",
    ]
    assert rows.endswith(given)


def test_what_cannot_be_asked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["run@initial"], "there must be a prompt, or --data, got neither; name one, or serve the model to chat with"),
        (["nowhere", "1+1="], "a model must be the directory of a run"),
        (["run", "1+1="], "there must be a checkpoint in run/checkpoints, found none"),
        (["run@initial", "1+1=", "--column", "answer"], "--column must read name=value, got 'answer'"),
        (["run@initial", "1+1=", "--column", "tests=[1"], "--column must give a text, or JSON after"),
        (["run@initial", "1+1=", "--data"], "got --data and '1+1='; drop one"),
        (["run@initial", "--data", "--rows", "a"], "--rows must name records like 0,2-4, got 'a'"),
        (["run@initial", "--data", "--rows", "8"], "--rows must name records of data.jsonl, which has 8, got 8"),
        (["run@initial", "1+1=", 'data.prompt_template="{a} {b}"'], "got a, b; give the other columns, and no more"),
        (["run@initial", "1+1=", "--column", "question=x"], "got none; give the other columns"),
        (["run@initial", "1+1=", "--context", "5000"], "must have at most 4096 tokens, the model's context, got 5000"),
        (["run@initial", "1+1=", "data.prompt_templat=x"], "did you mean data.prompt_template?"),
    ):
        assert main(words) == 2, words
        assert expected in capsys.readouterr().err, words


def test_answers_and_their_rewards_are_shown_by_name() -> None:
    ids = np.arange(2, dtype=np.int32)
    ended, cut = (Completion(ids, np.zeros(2, np.float32), reason, 0) for reason in ("stop", "length"))
    by_name = {"right": np.array([1.0, 0.0]), "short": np.array([0.25, np.nan])}
    scores = Scores(np.array([1.5, 0.0]), by_name, 0.0)
    assert answers_shown([ended, cut], ["ab", "c"], scores) == (
        "[1] ab\n[2] c [cut after 2 tokens]\n"
        "[1] rewards: right 1, short 0.25; total 1.5\n[2] rewards: right 0, short -; total 0\n"
    )
    assert answers_shown([ended], ["ab"]) == "ab\n"
