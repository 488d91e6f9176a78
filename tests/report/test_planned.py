"""A run's seconds beside those of its plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.records.errors import DataError
from tpu_grpo.report.planned import beside_plan, plan_table, read_planned

LINES: list[dict[str, Any]] = [
    {"step": 1, "update/seconds": 30.0, "rollout/decode_step_seconds": 0.9},  # which compiles
    {"step": 2, "update/seconds": 2.0, "rollout/decode_step_seconds": 0.0142},
    {"step": 3, "update/seconds": 1.0, "rollout/decode_step_seconds": 0.0102},
    {"step": 4, "update/seconds": 3.0, "rollout/decode_step_seconds": 0.0162},
]
PLANNED = {"decode_step": 0.0126, "update": 1.5, "sync": 0.1}


def test_medians_stand_beside_the_plan() -> None:
    found = [str(each) for each in beside_plan(LINES, PLANNED)]
    assert found == ["decode 14.2 ms a step, planned 12.6", "update 2 s, planned 1.5"]
    assert [str(each) for each in beside_plan(LINES[1:2], PLANNED)][1] == "update 2 s, planned 1.5"
    table = plan_table(LINES, PLANNED)
    assert table is not None
    assert [cell.text for cell in table.rows[0]] == ["decode", "14.2", "12.6", "ms a step"]
    assert plan_table(LINES, {}) is None


def test_a_plan_in_the_runs_directory_comes_before_a_check(tmp_path: Path) -> None:
    run, check = tmp_path / "run", tmp_path / "run_check"
    run.mkdir()
    check.mkdir()
    assert read_planned(run) == {}
    (check / "check.json").write_text(json.dumps({"planned": {"update": 2, "other": 1}}))
    assert read_planned(run) == {"update": 2.0}
    (run / "plan.json").write_text(json.dumps({"planned": PLANNED}))
    assert read_planned(run) == PLANNED


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"planned": null}', '{"planned": {"update": "soon"}}'])
def test_a_file_that_is_no_plan_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(DataError, match=r"plan\.json must hold planned seconds"):
        read_planned(tmp_path)
