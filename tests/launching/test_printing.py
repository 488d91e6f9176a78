"""Every command that is printed is one that gcloud has."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import gcloud_syntax
from tests.launching.driving import REPOSITORY, launch
from tests.launching.stand_in import StandIn
from tpu_grpo.cli.launch import main

EVERYTHING = [
    ["create", "--type", "v6e-16", "--zone", "z", "--project", "p", "--spot", "--valid-until", "6h"],
    ["create", "--type", "v5p-8", "--how", "vm", "--reserved", "--service-account", "a@b"],
    ["create", "--type", "v5p-8", "--network", "n", "--subnetwork", "s"],
    ["create", "--type", "v4-32", "--how", "vm", "--internal-ips", "--runtime", "tpu-vm-base"],
    ["setup", "--user", "me", "--ssh-key-file", "k"],
    ["run", "configs/demo_cpu.yaml", "logging.wandb_project=it's $HOME", "--tunnel-through-iap"],
    ["status", "--internal-ip"],
    ["logs", "--lines", "5"],
    ["logs", "--follow", "--tunnel-through-iap"],
    ["stop"],
    ["delete"],
    ["delete", "--how", "vm"],
    ["babysit", "--type", "v5e-16", "configs/gsm8k_cpu_check.yaml", "run.dir=/mnt/b/x", "checkpoint.every=5"],
]


@pytest.mark.parametrize("words", EVERYTHING, ids=lambda words: " ".join(words[:3]))
def test_a_dry_run_prints_valid_commands_and_runs_none(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert main([*words, "--dry-run"]) == 0
    printed = [shlex.split(line[2:]) for line in capsys.readouterr().err.splitlines() if line.startswith("$ ")]
    assert printed
    for command in printed:
        gcloud_syntax.check(command)
    assert stand_in.calls() == []


def test_what_is_printed_is_what_is_run(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(capsys, "create", "--type", "v5e-8", "--zone", "a b")[2].splitlines()[0] == (
        "$ gcloud compute tpus tpu-vm create grpo --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite "
        "'--zone=a b' --quiet"
    )
    _, _, err = launch(capsys, "status", "--zone", "a b")
    printed = [shlex.split(line[2:]) for line in err.splitlines() if line.startswith("$ ")]
    assert printed == stand_in.calls()[-len(printed) :]
    for command in stand_in.calls():
        gcloud_syntax.check(command)


@pytest.mark.parametrize(
    "words",
    [
        ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "a", "--batch-size=4"],  # alpha only
        ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "a", "--tunnel-through-iap"],  # alpha only
        ["gcloud", "compute", "tpus", "queued-resources", "create", "a", "--best-effort"],  # alpha only
        ["gcloud", "compute", "tpus", "tpu-vm", "create", "a", "--runtime-version=x"],  # of queued resources
        ["gcloud", "compute", "tpus", "tpu-vm", "create", "a"],
        ["gcloud", "compute", "tpus", "tpu-vm", "delete", "a", "--force"],
        ["gcloud", "compute", "tpus", "tpu-vm", "describe", "a", "b"],
        ["gcloud", "compute", "tpus", "tpu-vm", "describe", "a", "--zone"],
        ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "a", "--output-directory=d"],
        ["gcloud", "compute", "tpus", "queued-resource", "describe", "a"],
    ],
)
def test_commands_that_gcloud_does_not_have_are_found(words: list[str]) -> None:
    with pytest.raises(AssertionError):
        gcloud_syntax.check(words)


def test_help_imports_nothing_heavy_and_names_every_verb(tmp_path: Path) -> None:
    script = str(REPOSITORY / "scripts" / "launch.py")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", script, "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "tpu_grpo" in imported
    assert imported & {"jax", "numpy", "flax", "transformers", "rich", "wandb"} == set()
    for verb in ("create", "setup", "run", "status", "logs", "stop", "delete", "babysit"):
        assert f"  {verb} " in done.stdout
