"""scripts/plan.py as it is typed, for a model small enough to be compiled many times."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.random_checkpoint import write_random_qwen3

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "plan.py"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_random_qwen3(tmp_path / "model", layers=4, hidden=128, head_dim=128, intermediate=256, vocab=512)
    (tmp_path / "run.yaml").write_text(
        """
model: {path: model, dtype: bfloat16}
data: {prompts_per_step: 4, max_prompt_tokens: 32}
rollout: {max_new_tokens: 64, max_running_requests: 8, page_size: 16, prefill_tokens: 128}
algorithm: {group_size: 4}
rewards: [{name: exact_answer}]
"""
    )
    return tmp_path


def plan(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), "run.yaml", *arguments]
    environment = os.environ | {"TPU_GRPO_CACHE": str(directory / "cache")}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slice", "v5e-5"], "ConfigError: --slice v5e-N must count chips, N one of [1, 4, 8"),
        pytest.param(
            ["--slice", "v5e-4", "model.path=nowhere"],
            "ConfigError: model.path must be a directory with a config.json, or",
            marks=pytest.mark.slow,  # libtpu is opened first
        ),
        (["--slice", "v5e-4", "model.attention=none"], "ConfigError: model.attention"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(directory: Path, arguments: list[str], said: str) -> None:
    done = plan(directory, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slices
@pytest.mark.timeout(900)
def test_a_run_that_does_not_fit_ends_with_what_would_and_that_fits_as_json(directory: Path) -> None:
    """On v7x, where 4 chips are 8 devices. Its flags keep launches of decode steps from copying all weights.

    Keys and values of 128 bfloat16 in two heads and four layers: 4 KiB a token, 102 GiB for 26,738,688."""
    released = "rollout.release_during_update=true"  # else this is tried first
    done = plan(directory, "--slice", "v7x-8", "--fast", released, "rollout.kv_tokens=26738688")
    assert done.returncode == 2, done.stderr
    first = "slice      v7x-8: 4 chips, 1 hosts, 8 devices of 94.75 GiB; on GKE: launch.py run --on gke\n"
    assert done.stdout.startswith(first)
    assert "kernels    rollout flash attention, trainer flash attention in blocks of 128 tokens" in done.stdout
    assert "compiling gradients of a micro-batch (4 layers)" in done.stderr
    assert done.stderr.count("compiling a program of the weight sync") == 1  # as the suggestion has the same one
    assert re.search(r"does not fit: the rollout exceeds the chip by 7\.[23]\d GiB", done.stdout), done.stdout
    fitting = re.search(r"this fits, compiled as well: (rollout.kv_tokens=\d+) ", done.stdout)
    assert fitting, done.stdout
    asked = ("--json", "--price-per-chip-hour", "1.2", released, fitting[1])
    done = plan(directory, "--slice", "v7x-8", "--fast", *asked)
    assert "compiling" not in done.stderr  # all figures were kept
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["fits"]
    assert found["compiled_layers"] == [2, 4]
    decode, prefill, gradients, step = found["programs"]
    assert decode["temporary_bytes"] - prefill["temporary_bytes"] < found["held"]["sampler"] / 2
    # of 4 layers: forward, and backward for queries and for keys
    assert [each["kernels"] for each in (decode, prefill, gradients, step)] == [4, 4, 3 * 4, 0]
    assert {stage["stage"] for stage in found["stages"]} == {"rollout", "update", "sync"}
    assert found["step_seconds"] == pytest.approx(sum(stage["seconds"] for stage in found["time"]))
    rollout = found["rollout_seconds"]
    assert found["rollout_seconds_range"] == pytest.approx([0.75 * rollout, 2.5 * rollout])
    most = 2.5 * rollout + 1.3 * (found["step_seconds"] - rollout)
    assert found["step_seconds_range"] == pytest.approx([0.75 * found["step_seconds"], most])
    assert found["chip_hours"] == pytest.approx(found["step_seconds"] * 100 * 4 / 3600)
    assert found["cost"] == pytest.approx(found["chip_hours"] * 1.2)
