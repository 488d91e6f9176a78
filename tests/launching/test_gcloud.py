"""Every command that is printed is one that gcloud has; what goes wrong, and what is said about it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.goldens import cases, compare
from tests.launching import gcloud_syntax
from tests.launching.driving import REPOSITORY, SMALL, Launch, imported
from tests.launching.stand_in import StandIn
from tpu_grpo.cli.launch import main

DRY_RUNS = Path(__file__).with_name("dry_runs.txt")
MISTAKES = Path(__file__).with_name("mistakes.txt")
CHANGES = {
    re.escape(str(REPOSITORY)): "CHECKOUT",
    r"/\S*/tpu_grpo_launch_\w+": "TEMPORARY",
    r"\d{8}-\d{6}-[0-9a-f]{8}": "JOB",
    r"""(?<=unpack |OUT at )('"'"')?[0-9a-f]{7,40}( and \d+ changed files?)?('"'"')?""": "COMMIT",
    r"[\d.]+ MiB": "SIZE",
    r"\(fatal: .*\)(?=; clone)": "(GIT)",
}
"""What is another in every run, and the word for it in the files."""


def without_changes(printed: str) -> str:
    for pattern, word in CHANGES.items():
        printed = re.sub(pattern, word, printed)
    return printed


@pytest.mark.parametrize(("words", "told"), cases(DRY_RUNS))
def test_a_dry_run_prints_valid_commands_and_runs_none(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, told: str
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert main([*shlex.split(words), "--dry-run"]) == 0
    err = capsys.readouterr().err
    printed = [shlex.split(line[2:]) for line in err.splitlines() if line.startswith("$ ")]
    assert printed
    for command in printed:
        gcloud_syntax.check(command)
    assert stand_in.calls() == []
    compare(DRY_RUNS, words, told, without_changes(err.rstrip()))


def test_what_is_printed_is_what_is_run(stand_in: StandIn, launch: Launch) -> None:
    assert launch("create", "--type", "v5e-8", "--zone", "a b")[2].splitlines()[0] == (
        "$ gcloud compute tpus tpu-vm create grpo --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite "
        "'--zone=a b' --quiet"
    )
    _, _, err = launch("status", "--zone", "a b")
    printed = [shlex.split(line[2:]) for line in err.splitlines() if line.startswith("$ ")]
    assert printed == stand_in.calls()[-len(printed) :]
    for command in stand_in.calls():
        gcloud_syntax.check(command)


CREATE = ["gcloud", "compute", "tpus", "queued-resources", "create", "a", "--accelerator-type=t", "--runtime-version=v"]


@pytest.mark.parametrize(
    "words",
    [
        ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "a", "--batch-size=4"],  # alpha only
        ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "a", "--tunnel-through-iap"],  # alpha only
        ["gcloud", "compute", "tpus", "queued-resources", "create", "a", "--best-effort"],  # alpha only
        [*CREATE, "--node-id=a", "--node-count=2"],
        [*CREATE, "--node-prefix=a"],
        CREATE,
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
    assert "tpu_grpo" in imported(done.stderr)
    assert imported(done.stderr) & {"jax", "numpy", "flax", "transformers", "rich", "wandb"} == set()
    for verb in ("create", "setup", "run", "status", "logs", "stop", "delete", "babysit", "watch"):
        assert f"  {verb} " in done.stdout


# --- what goes wrong -------------------------------------------------------------------------------------------------

QUOTA = "RESOURCE_EXHAUSTED: Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in z."
CAPACITY = (
    '{\n  "code": 8,\n  "message": "There is no more capacity in the zone \\"z\\"; you can try in another zone"\n}'
)
AGENT = 'SSH Key is not present in the SSH agent. Please run "ssh-add k" to add it, and try again.'
HINT = (  # which gcloud gives on any failure with several workers
    'This may have happened if you have not added your SSH key to your ssh-agent using "ssh-add k". --internal-ip.\n'
    "Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255]."
)
SAID = [
    ("create", QUOTA, "quota", "quota page"),
    ("create", CAPACITY, "capacity", "wait in the queue (--how queued)"),
    ("create", "PERMISSION_DENIED: Permission 'tpu.nodes.create' denied", "permission", "tpu.admin"),
    ("create", "You do not currently have an active account selected.", "login", "gcloud auth login"),
    ("create", 'received an invalid AcceleratorType, "v5e-8" for zone', "type", "accelerator-types list"),
    ("create", "ALREADY_EXISTS: Resource 'grpo' already exists", "exists", "another --name"),
    ("create", "The required property [project] is not currently set.", "project", "config set project"),
    ("describe", "The required property [compute/zone] is not currently set.", "zone", "--zone"),
    ("describe", "Permission denied on 'locations/x' (or it may not exist).", "zone", "locations list"),
    ("describe", "Cloud TPU API has not been used in project 1 before", "api", "services enable"),
    ("ssh", HINT, "ssh", "port 22"),
    ("ssh", "[/usr/bin/ssh] exited with return code [255].", "ssh", "port 22"),
    ("ssh", "This TPU is going through a maintenance event, and is", "maintenance", "HEALTHY"),
    ("ssh", "'This TPU has terminal state \"PREEMPTED\", so it cannot be used anymore.'", "gone", "babysit"),
    ("scp", AGENT, "agent", "ssh-add"),
    ("delete", "UNAVAILABLE: The service is currently unavailable.", "passing", "try again"),
    ("delete", "FAILED_PRECONDITION: something new", "unknown", "look at what gcloud printed"),
]
VERBS = {"describe": "status", "ssh": "status", "scp": "setup"}
"""Those that call these commands of gcloud; the others have the names of theirs."""


@pytest.mark.parametrize(("command", "said", "kind", "remedy"), SAID, ids=lambda value: value[:20])
def test_errors_of_gcloud_are_shown_with_what_to_do(
    stand_in: StandIn, launch: Launch, command: str, said: str, kind: str, remedy: str
) -> None:
    verb = VERBS.get(command, command)
    if verb != "create":
        assert launch("create", "--type", "v5e-8")[0] == 0
    stand_in.fail(f"tpu-vm {command}", said)
    code, _, err = launch(verb, *(["--type", "v5e-8"] if verb == "create" else []))
    assert code == 1
    assert f"failed ({kind}, exit code 1)" in err
    assert said.splitlines()[0] in err  # gcloud's own words
    assert remedy in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(("words", "told"), cases(MISTAKES))
def test_mistakes_are_refused_before_anything_happens(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, told: str
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    is_setup = words.startswith("setup")
    if is_setup:
        assert main(["create", "--type", "v5e-8"]) == 0
    capsys.readouterr()
    code = main(shlex.split(words))
    out, err = capsys.readouterr()
    assert (code, out, "hf_s3cret" in err) == (2, "", False)
    compare(MISTAKES, words, told, without_changes(err.rstrip()))
    assert [verb for verb in stand_in.verbs() if verb.split()[1] in ("ssh", "scp")] == []
    assert is_setup or stand_in.calls() == []


def test_without_a_name_or_gcloud_or_a_number_of_slices(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["status"]) == 2
    assert "gcloud must be on the PATH" in capsys.readouterr().err
    monkeypatch.setenv("TPU_SLICES", "two")
    assert main(["status"]) == 2
    assert "--slices must be a whole number >= 1, got two; leave it and TPU_SLICES out" in capsys.readouterr().err
    monkeypatch.delenv("TPU_SLICES")
    monkeypatch.delenv("TPU_NAME")
    assert main(["status"]) == 2
    assert "--name must say which TPU, got none; give it, or set TPU_NAME" in capsys.readouterr().err


def test_a_slice_that_is_not_there_or_not_ready(
    stand_in: StandIn, config: Path, capsys: pytest.CaptureFixture[str], launch: Launch
) -> None:
    assert launch("run", *SMALL, str(config))[0] == 1
    assert launch("delete")[0] == 0  # as wanted
    assert main(["create", "--type", "v5e-8", "--no-wait"]) == 0
    capsys.readouterr()
    assert main(["run", *SMALL, str(config)]) == 1
    assert "grpo must be ready, got: queued resource WAITING_FOR_RESOURCES; wait" in capsys.readouterr().err
    assert main(["status"]) == 0
    stand_in.preempt()
    assert main(["run", *SMALL, str(config)]) == 1
    assert "grpo must be ready, got: queued resource SUSPENDED" in capsys.readouterr().err
