"""What is found in a run's directory: samples by jumps, and nothing that a run may leave out is needed."""

import json
from pathlib import Path

import pytest

from tests.observe.report.runs import leave_evaluation, leave_run
from tpu_grpo.observe.report import reading
from tpu_grpo.observe.report.reading import read_run, read_samples
from tpu_grpo.records.errors import DataError


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
    monkeypatch.setattr(reading.json, "loads", lambda text, loads=json.loads: parsed.append(len(text)) or loads(text))
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
