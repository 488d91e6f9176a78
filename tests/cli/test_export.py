"""The command that exports a checkpoint, and what it refuses; what a whole run leaves is in test_evaluate.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_grpo.cli.export import export_checkpoint, main

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("run: {name: r, dir: elsewhere}\n")
    return tmp_path / "run"


def test_a_step_and_the_best_exclude_each_other_and_a_place_is_needed(run_dir: Path) -> None:
    for words in (["--step", "1", "--best"], []):
        with pytest.raises(SystemExit) as ended:
            main([str(run_dir), *words])
        assert ended.value.code == 2


@pytest.mark.full
def test_a_run_without_a_checkpoint_is_refused_where_its_directory_lies_now(run_dir: Path) -> None:
    """Whatever jax's platform is where the command is typed: a TPU is left to the run."""
    command = [sys.executable, str(REPOSITORY / "scripts/export.py"), str(run_dir), "--out", str(run_dir / "out")]
    environment = os.environ | {"JAX_PLATFORMS": "tpu", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([*command, "--last"], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"CheckpointError: there must be a checkpoint in {run_dir}/checkpoints, found none; check run.dir\n"
    )


def test_the_best_step_of_a_run_that_never_got_better_is_no_checkpoint(run_dir: Path) -> None:
    (run_dir / "best.json").write_text(json.dumps({"step": 0}))
    from tpu_grpo.cli.starting import run_config
    from tpu_grpo.records.errors import CheckpointError

    with pytest.raises(CheckpointError, match="best step of this run must be a checkpoint, and is 0: no evaluation"):
        export_checkpoint(run_config(run_dir), "best", run_dir / "out")
    shutil.rmtree(run_dir)
