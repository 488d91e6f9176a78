"""Dynamic sampling, pools and retirement on several processes: the prompts and tokens of one, also after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import SOON, outcome, run_hosts, settings
from tests.test_pipeline_signal import DATA, LUCKY

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(900)]


def tree(run_dir: Path) -> dict[str, Any]:
    return settings(
        run_dir,
        run={"dir": str(run_dir), "max_steps": 6, "seed": 5},
        data=DATA | {"path": "data.jsonl"},
        rewards=[{"name": "lucky.py:lucky", "workers": 0}],
        checkpoint={"every": 2},
    )


def history(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]


def test_two_processes_take_the_prompts_of_one_also_after_a_kill(files: Path, tmp_path: Path) -> None:
    (files / "lucky.py").write_text(LUCKY)
    one, two = tmp_path / "one", tmp_path / "two"
    ended = run_hosts(1, 4, files, tree(one))
    assert ended.code == 0, ended.errors
    killed = run_hosts(2, 2, files, tree(two) | SOON, fault="lost:SIGKILL,update of step 4")
    assert "LockstepError: lost host 1: " in killed.of_host(0), killed.errors
    assert history(two) == history(one)[:3]
    ended = run_hosts(2, 2, files, tree(two))
    assert ended.code == 0, ended.errors
    assert "continuing after step 2" in ended.out
    assert outcome(two) == outcome(one)
    assert history(two) == history(one)
    rounds = [json.loads(line)["groups/rounds"] for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert set(rounds) == {1, 2}
