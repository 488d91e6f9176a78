"""Two slices, which one process or two stand for: the parameters of one run with the same global batch."""

from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import outcome, run_hosts, settings

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(1200)]


def two_passes(run_dir: Path, slices: int = 1, **sections: Any) -> dict[str, Any]:
    """A run whose updates have two micro-batches, one for each of two slices."""
    algorithm = {"group_size": 4, "micro_batch_prompts": 2} | sections.pop("algorithm", {})
    meshes = {"slices": slices, "sampler": {"tensor": 1}, "probe_every": 1} | sections.pop("meshes", {})
    return settings(run_dir, algorithm=algorithm, meshes=meshes, **sections)


def test_two_slices_learn_what_one_learns(files: Path, tmp_path: Path) -> None:
    """Bit for bit, because a sum of two gradients has one order; also after a continued start."""
    ended = run_hosts(1, 2, files, two_passes(tmp_path / "one"), "run.max_steps=4")
    assert ended.code == 0, ended.errors
    tree = two_passes(tmp_path / "two", slices=2, checkpoint={"every": 2})
    for words in (["run.max_steps=2"], ["run.max_steps=4", "checkpoint.resume=require"]):
        ended = run_hosts(2, 2, files, tree, *words)
        assert ended.code == 0, ended.errors
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")
