from pathlib import Path
from typing import Any

import pytest

from tests.observe.report.runs import leave_run
from tpu_grpo.hosts import End
from tpu_grpo.observe.report.reading import read_run
from tpu_grpo.observe.report.standing import Standing, standing_of, write_end
from tpu_grpo.records.errors import ConfigError, Interrupted

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


def test_an_error_of_the_disk_is_told_as_people_are() -> None:
    end = End.by(OSError(28, "No space left on device", "runs/x/report.html"))
    assert end.message.startswith(
        "DiskError: the disk must take runs/x/report.html, got: No space left on device; free"
    )
