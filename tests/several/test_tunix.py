"""Tunix's learner in runs of several processes: results do not depend on the number of processes."""

from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import outcome, run_hosts, settings

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(600)]
ALGORITHM = {
    "name": "tunix:grpo",
    "options": {"beta": 0.01, "num_iterations": 2},
    "micro_batch_prompts": 2,
    "old_policy": "trainer",
}
"""A reference, a second forward pass, and gradients that add up over two passes."""


@pytest.mark.parametrize(
    "sections",
    [
        {},
        pytest.param({"model": {"lora": {"rank": 2}}}, marks=pytest.mark.slow),
        pytest.param({"meshes": {"layout": "split"}}, marks=pytest.mark.slow),
        pytest.param({"model": {"dtype": "bfloat16", "remat": "decoder"}}, marks=pytest.mark.slow),
    ],
    ids=["whole", "lora", "split", "bfloat16"],
)
def test_tokens_and_parameters_are_those_of_one_process(files: Path, tmp_path: Path, sections: dict[str, Any]) -> None:
    for hosts, devices in ((1, 4), (2, 2)):
        tree = settings(tmp_path / str(hosts), algorithm=ALGORITHM, **sections)
        ended = run_hosts(hosts, devices, files, tree, "run.max_steps=3")
        assert ended.code == 0, ended.errors
    assert outcome(tmp_path / "2") == outcome(tmp_path / "1")
