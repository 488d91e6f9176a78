"""What is found in a run's directory, nothing of which is needed: samples by jumps, and how the run stands."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import leave_evaluation, leave_run
from tpu_grpo.hosts import End
from tpu_grpo.observe.standing import Standing, write_end
from tpu_grpo.records.errors import ConfigError, DataError, Interrupted
from tpu_grpo.report import run_reader
from tpu_grpo.report.run_reader import read_run, read_samples, standing_of

# --- files ------------------------------------------------------------------------------------------------------------


def write_samples(path: Path, steps: dict[int, int], *, torn: str = "") -> Path:
    """So many rows of each step, of very different lengths."""
    lines = [
        json.dumps({"step": step, "row": row, "completion": "ü" * (row * 37 % 101)}) + "\n"
        for step, rows in steps.items()
        for row in range(rows)
    ]
    path.write_text("".join(lines) + torn)
    return path


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ({}, []),
        ({5: 3}, [5]),
        ({5: 3, 10: 1}, [5, 10]),
        ({5: 3, 10: 1, 15: 40}, [5, 10, 15]),
        ({5: 1, 100: 200, 101: 1}, [5, 100, 101]),  # the first that was logged from the middle, 53, on
        (dict.fromkeys(range(10, 2001, 10), 7), [10, 1010, 2000]),
    ],
)
@pytest.mark.parametrize("torn", ["", '{"step": 9999, "comp'])
def test_the_first_a_middle_and_the_last_step_are_found_with_all_their_rows(
    tmp_path: Path, steps: dict[int, int], found: list[int], torn: str
) -> None:
    samples = read_samples(write_samples(tmp_path / "samples.jsonl", steps, torn=torn))
    assert [[row["step"] for row in rows] for rows in samples] == [[step] * steps[step] for step in found]
    assert [[row["row"] for row in rows] for rows in samples] == [list(range(steps[step])) for step in found]


def test_few_bytes_are_read_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_samples(tmp_path / "samples.jsonl", dict.fromkeys(range(1, 2001), 30))
    parsed = []
    monkeypatch.setattr(run_reader, "parse_json", lambda text: parsed.append(len(text)) or json.loads(text))
    assert len(read_samples(path)) == 3
    assert sum(parsed) < path.stat().st_size / 20


def test_of_a_step_with_many_rows_the_first_are_read(tmp_path: Path) -> None:
    samples = read_samples(write_samples(tmp_path / "samples.jsonl", {1: 1000, 2: 1}))
    assert [len(rows) for rows in samples] == [256, 1]


def test_held_out_completions_are_greedy_ones_of_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    leave_run(tmp_path, 1)
    for step in (0, 5, 10):
        leave_evaluation(tmp_path, step, [1.0, 0.0])
    found = read_run(tmp_path).held_out
    assert [(step, [row["completion"] for row in rows]) for step, rows in found] == [
        (0, ["greedy answer 0 after 0", "greedy answer 1 after 0"]),
        (10, ["greedy answer 0 after 10", "greedy answer 1 after 10"]),
    ]
    (tmp_path / "evaluations" / "0.jsonl").unlink()
    assert [step for step, _ in read_run(tmp_path).held_out] == [10]


@pytest.mark.parametrize(("make", "what"), [(True, "holds neither"), (False, "is no directory")])
def test_what_is_no_run_is_refused(tmp_path: Path, make: bool, what: str) -> None:
    if make:
        (tmp_path / "x").mkdir()
    with pytest.raises(DataError, match=rf"needs the directory of a run \(run\.dir\), .*x {what}"):
        read_run(tmp_path / "x")


def test_a_line_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    leave_run(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rewa')
    (tmp_path / "end.json").write_text("")
    run = read_run(tmp_path)
    assert ([line["step"] for line in run.lines], run.standing.step) == ([1, 2], 2)


def test_a_config_is_read_as_a_run_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: 2026-01-01, max_steps: 7}\noptimizer: {learning_rate: 1e-6}\n")
    run = read_run(tmp_path)
    assert (run.name, run.standing.max_steps, run.config["optimizer"]) == ("2026-01-01", 7, {"learning_rate": 1e-6})


# --- how a run stands -------------------------------------------------------------------------------------------------

AT = "2026-11-23 06:00:00 UTC"
STOPPED = {"outcome": "stopped", "message": "stopped after step 7 as asked", "exit_code": 4, "at": AT, "step": 7}


@pytest.mark.parametrize(
    ("end", "summary", "goes_on", "sentence"),
    [
        ({}, {}, True, "The run goes on: step 7 of 60; written "),
        (STOPPED, {}, True, "The run goes on: step 7 of 60; written "),  # it was continued
        (STOPPED, {}, False, f"The run was stopped after step 7 of 60, {AT}: stopped after step 7 as asked."),
        (
            {**STOPPED, "outcome": "done", "message": ""},
            {},
            False,
            f"The run is done, after step 7 of 60. It ended {AT}.",
        ),
        (
            {**STOPPED, "outcome": "failed", "exit_code": 3},
            {},
            False,
            f"The run failed after step 7 of 60, {AT}, with exit code 3.",
        ),
        # runs of versions that left no end.json
        ({}, {"steps": 7}, False, "The run is done, after step 7 of 60."),
        ({}, {"steps": 7, "ended_early": "all retired"}, False, "The run is done, after step 7 of 60: all retired."),
        ({}, {"steps": 5}, False, "The run ended after step 7 of 60 without saying why: it was killed, or "),
        ({}, {}, False, "The run ended after step 7 of 60 without saying why: it was killed, or "),
        ({"outcome": "odd"}, {}, False, "The run ended after step 7 of 60 without saying why: it was killed, or "),
    ],
)
def test_how_a_run_stands_by_its_files(
    end: dict[str, Any], summary: dict[str, Any], goes_on: bool, sentence: str
) -> None:
    assert standing_of(end, summary, 7, 60, goes_on=goes_on).sentence.startswith(sentence)


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(None, ""), (45.0, ", about 45 s left"), (600.0, ", about 10 min left"), (9000.0, ", about 2 h 30 min left")],
)
def test_a_run_that_goes_on_says_how_long(seconds: float | None, left: str) -> None:
    standing = Standing("going", 3, 60, at=AT, seconds_left=seconds)
    assert standing.sentence == f"The run goes on: step 3 of 60{left}; written {AT}."


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (None, "done", 0),
        (Interrupted("as asked"), "stopped", 4),
        (ConfigError("no"), "failed", 2),
        (KeyError("x"), "failed", 1),
    ],
)
def test_what_is_written_of_an_end_is_read_back(
    tmp_path: Path, error: BaseException | None, outcome: str, code: int
) -> None:
    leave_run(tmp_path, 2)
    written = Standing.after(End.by(error), 2, 10)
    write_end(tmp_path, written)
    read = read_run(tmp_path).standing
    assert (read.outcome, read.exit_code, read.message, read.at) == (outcome, code, written.message, written.at)
    assert (read.step, read.max_steps) == (2, 10)
