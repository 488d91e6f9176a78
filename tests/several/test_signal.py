"""Dynamic sampling, pools and retirement on several processes: the prompts and tokens of one, also after a kill.

The engines have int8 weights, which a continued run makes of the parameters of its checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import SOON, completed, lines, outcome, run_hosts, settings
from tests.test_pipeline_signal import DATA, LUCKY

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(900)]


def tree(run_dir: Path) -> dict[str, Any]:
    return settings(
        run_dir,
        run={"max_steps": 4},
        data=DATA | {"path": "data.jsonl"},
        rewards=[{"name": "lucky.py:lucky", "workers": 0}],
        meshes={"sampler": {"tensor": 2}},  # an engine a host
        rollout={"weights_dtype": "int8"},
        checkpoint={"every": 2},
    )


def test_two_processes_take_the_prompts_of_one_also_after_a_kill(files: Path, tmp_path: Path) -> None:
    (files / "lucky.py").write_text(LUCKY)
    one, two = tmp_path / "one", tmp_path / "two"
    completed(1, 4, files, tree(one))
    killed = run_hosts(2, 2, files, tree(two) | SOON, fault="lost:SIGKILL,update of step 4")
    assert "LockstepError: lost host 1: " in killed.of_host(0), killed.errors
    assert lines(two, "history.jsonl") == lines(one, "history.jsonl")[:3]
    ended = completed(2, 2, files, tree(two))
    assert "continuing after step 2" in ended.out
    assert outcome(two) == outcome(one)
    assert lines(two, "history.jsonl") == lines(one, "history.jsonl")
    assert {line["groups/rounds"] for line in lines(one)} == {1, 2}
