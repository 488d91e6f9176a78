"""The command that lets models answer: what it refuses, and whole answers of a small random model."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_grpo.cli.sample import main

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_directory_of_the_run(unstarted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(unstarted)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.slow  # six engines
def test_answers_are_the_same_alone_and_beside_others(capsys: pytest.CaptureFixture[str]) -> None:
    alone = told(capsys, "run@initial", "1+1=", "2+1=", "--n", "2")
    prompt = "=== {}\n"
    first, second = (re.escape(prompt.format(question)) for question in ("1+1=", "2+1="))
    answers = r"\[1\] .*\n\[2\] .*\n"
    assert re.fullmatch(first + answers + second + answers, alone, re.DOTALL)
    beside = told(capsys, "run@initial", "--with", "model", "1+1=", "--n", "2", "--seed", "5")
    to_the_first = alone.split(prompt.format("2+1="))[0].removeprefix(prompt.format("1+1="))
    assert beside == f"--- run@initial\n{to_the_first}--- model\n{to_the_first}"  # it is the same model
    assert told(capsys, "run@initial", "1+1=", "--n", "2", "--seed", "6") != to_the_first


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


@pytest.mark.slow  # a process of its own
def test_ctrl_c_ends_an_answer_and_not_the_chat(unstarted: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "scripts/sample.py"), "run@initial", "--temperature", "0"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [*command, "--max-new-tokens", "4000", "--context", "4096"],  # the greedy answer does not end by itself
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=unstarted,
        bufsize=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"1+1=\n")
        begun = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(b"/reset\n/exit\n", timeout=120)
    assert begun, errors
    assert out.endswith(b" [interrupted]\n(a new conversation)\n"), (out[-200:], errors)
    assert process.returncode == 0
