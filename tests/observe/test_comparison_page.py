"""Runs of different lengths, metrics and settings on one page."""

import json
from pathlib import Path

import pytest

from tests.observe.runs import Page, leave_evaluation, leave_run
from tpu_grpo.observe.comparison_page import write_comparison
from tpu_grpo.observe.run_log import JsonlSink
from tpu_grpo.observe.run_reader import differences, read_run


def compared(*directories: Path) -> Page:
    runs = [read_run(directory) for directory in directories]
    return Page(write_comparison(runs, directories[0] / "comparison.html").read_text())


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """A run of ten steps with evaluations, and one of four steps by an older version, which measured less."""
    long = leave_run(tmp_path / "long", 10, name="long", optimizer={"learning_rate": 1e-6, "b1": 0.9})
    for step, values in ((0, [0.0, 1.0]), (10, [1.0, 1.0])):
        leave_evaluation(long, step, values)
    short = tmp_path / "short"
    sink = JsonlSink(short, 0)
    for step in range(1, 5):
        sink.write({"step": step, "rewards/mean": 0.25, "step/seconds": 2.0, "evaluation/greedy/exact_answer": 0.25})
    sink.close()
    (short / "config.yaml").write_text("run: {name: short, max_steps: 10}\noptimizer: {learning_rate: 1e-5, b1: 0.9}\n")
    return long, short


def test_curves_lie_over_each_other_with_their_own_steps(runs: tuple[Path, Path]) -> None:
    charts = compared(*runs).charts
    reward = charts["Reward"]
    assert [line["l"] for line in reward["lines"]] == ["long", "short"]
    assert (reward["steps"], reward["lines"][1]["x"]) == (list(range(1, 11)), [1, 2, 3, 4])
    assert reward["lines"][1]["y"] == [0.25] * 4
    assert reward["x"] == [1, 10]
    evaluation = charts["Held out: greedy exact_answer"]
    assert [(line["l"], line["y"]) for line in evaluation["lines"]] == [("long", [0.5, 1]), ("short", [0.25] * 4)]
    seconds = charts["Seconds per step"]
    assert [line["y"][-1] for line in seconds["lines"]] == [1.7, 2]
    assert [line["l"] for line in charts["Entropy"]["lines"]] == ["long"]  # which keeps its colour
    assert {"Completions truncated", "Groups with equal rewards"} <= set(charts)
    assert "Clipped tokens" not in charts


def test_runs_settings_and_evaluations_side_by_side(runs: tuple[Path, Path]) -> None:
    overview, evaluation, settings = compared(*runs).tables
    assert overview[0][:3] == ["run", "stands", "steps"]
    assert overview[1] == ["long", "gone", "10 of 10", "0.300 → 0.800", "0.500 → 1.000", "1.7", "6,000"]
    assert overview[2] == ["short", "gone", "4 of 10", "0.250 → 0.250", "0.250 → 0.250", "2", "–"]
    assert evaluation == [
        ["held out", "long", "short"],
        ["greedy exact_answer", "1.0000.900 to 1.100, step 10", "0.250step 4"],
    ]
    assert settings == [["setting", "long", "short"], ["optimizer.learning_rate", "1e-06", "1e-05"]]


def test_settings_that_differ_name_lists_and_what_a_config_does_not_have() -> None:
    first = {"run": {"name": "a", "seed": 1}, "rewards": [{"name": "x"}], "model": {"lora": {"rank": 8}}}
    second = {"run": {"name": "b", "seed": 1}, "rewards": [{"name": "y"}], "model": {"lora": {}}}
    assert differences([first, second]) == {
        "rewards": ['[{"name": "x"}]', '[{"name": "y"}]'],
        "model.lora.rank": ["8", "–"],
    }


def test_the_same_held_out_prompts_show_what_each_run_completes_them_to(tmp_path: Path) -> None:
    first, second = (leave_run(tmp_path / name, 2, name="same") for name in ("a", "b"))
    leave_evaluation(first, 2, [1.0, 1.0, 1.0])
    leave_evaluation(second, 2, [1.0, 1.0, 0.0])
    page = compared(first, second)
    table = page.tables[-1]
    assert table[0] == ["prompt", "right answer", "a", "b"]  # by their directories, because they have one name
    assert table[1] == [
        "held out 2",
        "gold 2",
        "greedy answer 2 after 2exact_answer 1.00",
        "greedy answer 2 after 2exact_answer 0.00",
    ]
    assert "The configs are the same, but for names and directories." in page.text


def test_how_each_run_stands(tmp_path: Path) -> None:
    first, second = (leave_run(tmp_path / name, 2, name=name) for name in ("a", "<b>"))
    (first / "end.json").write_text(
        json.dumps({"outcome": "failed", "message": "NaN <u>", "exit_code": 1, "at": "now"})
    )
    runs = [read_run(first), read_run(second, goes_on=True)]
    page = Page(write_comparison(runs, tmp_path / "comparison.html").read_text())
    assert [row[1] for row in page.tables[0]] == ["stands", "failedNaN <u>", "going"]
    assert "Some still go on" in page.text
    assert {"b", "u"} & set(page.tags) == set()
