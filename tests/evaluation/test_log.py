"""The file that remembers evaluations, and which of them was the best."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tpu_grpo.evaluation import Estimate, Evaluation, EvaluationLog, evaluation_of, record_of
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import DataError


def evaluation(step: int, value: float) -> Evaluation:
    estimates = {
        mode: {"r": Estimate(v, v - 0.1, v + 0.1, 8)} for mode, v in (("greedy", value), ("sampled", value / 2))
    }
    return Evaluation(step, estimates, {"greedy": 3.0}, {"greedy": 0.5}, "d1")


def open_log(directory: Path, start: int, best: str = "greedy/r") -> EvaluationLog:
    return EvaluationLog(directory, start, best, Hosts())


def test_a_new_log_has_no_summary_and_no_file(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    assert (log.done, log.summary(), log.best, log.best_step) == ([], {}, None, None)
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_a_line_per_evaluation(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    log.add(evaluation(0, 0.5))
    log.add(evaluation(10, 1.0))
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "step": 0,
        "evaluation/greedy/r": 0.5,
        "evaluation/sampled/r": 0.25,
        "evaluation/tokens/greedy": 3.0,
        "evaluation/truncated/greedy": 0.5,
        "intervals": {"greedy/r": [0.4, 0.6, 8], "sampled/r": [0.15, 0.35, 8]},
        "digest": "d1",
    }
    assert [line["step"] for line in lines] == [0, 10]


def test_an_evaluation_survives_being_written() -> None:
    found = evaluation(3, 0.5)
    assert evaluation_of(json.loads(json.dumps(record_of(found)))) == found
    found = replace(found, failed={"greedy": 0.25})  # of conversations
    assert record_of(found)["evaluation/failed/greedy"] == 0.25
    assert evaluation_of(json.loads(json.dumps(record_of(found)))) == found
    line = {"step": 5, "evaluation/greedy/r": 0.5}  # of a version that told no intervals
    old = evaluation_of(line)
    assert old.means == {"greedy": {"r": 0.5}}
    assert math.isnan(old.estimates["greedy"]["r"].low)


def test_the_summary_has_the_first_the_last_and_the_best(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    log.add(evaluation(0, 0.25))
    assert log.summary()["evaluation/before"] == log.summary()["evaluation/after"] == evaluation(0, 0.25).means
    log.add(evaluation(5, 1.0))
    log.add(evaluation(10, 0.5))
    assert log.summary() == {
        "evaluation/before": {"greedy": {"r": 0.25}, "sampled": {"r": 0.125}},
        "evaluation/after": {"greedy": {"r": 0.5}, "sampled": {"r": 0.25}},
        "evaluation/intervals": {"greedy/r": [0.4, 0.6, 8], "sampled/r": [0.15, 0.35, 8]},
        "evaluation/best": {"step": 5, "of": "greedy/r", "value": 1.0, "interval": [0.9, 1.1, 8]},
    }


def test_the_best_is_the_first_of_the_highest(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    found = []
    for step, value in ((0, 0.5), (5, 0.75), (10, 0.75), (15, 0.6), (20, 0.8)):
        log.add(evaluation(step, value))
        found.append(log.best_step)
        assert json.loads((tmp_path / "best.json").read_text())["step"] == log.best_step
    assert found == [0, 5, 5, 5, 20]


def test_the_best_of_what_is_not_there(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0, "pass@4/r")
    log.add(evaluation(0, 0.5))
    assert log.best is None
    assert "evaluation/best" not in log.summary()
    assert not (tmp_path / "best.json").exists()


def test_a_continued_log_keeps_what_was_done_and_drops_later_steps(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    for step in (0, 5, 10, 15):
        log.add(evaluation(step, step / 20))
    continued = open_log(tmp_path, 10)  # the newest checkpoint is of step 10
    assert continued.done == [evaluation(0, 0.0), evaluation(5, 0.25), evaluation(10, 0.5)]
    assert continued.best_step == 10
    continued.add(evaluation(15, 0.4))
    assert open_log(tmp_path, 20).done == [*continued.done]
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 10


def test_a_fresh_start_keeps_none(tmp_path: Path) -> None:
    open_log(tmp_path, 0).add(evaluation(0, 0.5))
    assert open_log(tmp_path, 0).done == []


def test_a_line_that_a_kill_tore_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    open_log(tmp_path, 0).add(evaluation(0, 0.5))
    with (tmp_path / "evaluation.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "mea')
    open_log(tmp_path, 5).add(evaluation(10, 1.0))
    assert open_log(tmp_path, 10).done == [evaluation(0, 0.5), evaluation(10, 1.0)]


def test_a_broken_file_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "evaluation.jsonl").write_bytes(b'{"step": 0\n{"step": 5, "means": {}}\n')
    with pytest.raises(DataError, match=r"evaluation\.jsonl:1 must be one JSON object"):
        open_log(tmp_path, 5)
