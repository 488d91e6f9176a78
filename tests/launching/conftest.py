import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching.driving import Launch
from tests.launching.kubernetes_stand_in import Kubernetes
from tests.launching.stand_in import StandIn
from tpu_grpo.cli.launch import main

PROGRAM = """
import json, os, pathlib, sys, time
words = dict(word.partition("=")[::2] for word in sys.argv[2:])
home = pathlib.Path(os.environ["HOME"])
started = len(list(home.glob("started*")))
note = {"argv": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd()}
(home / f"started{started}").write_text(json.dumps(note))
print("worker", os.environ["WORKER"], "runs", pathlib.Path(sys.argv[1]).read_text().strip())
time.sleep(float(words.get("seconds", 0)))
if words.get("fails_on") in (os.environ["WORKER"], "all"):
    print("no luck")
    sys.exit(int(words["code"]))
print("finished")
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """gcloud on the PATH, with slices of two workers; no process of them outlives the test."""
    made = StandIn.install(tmp_path / "cloud")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("TPU_ZONE", "TPU_PROJECT", "TPU_TYPE", "TPU_SLICES", "WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_NAME", "grpo")
    monkeypatch.setattr("tpu_grpo.launching.tpu_slice.POLL_SECONDS", 0.01)
    yield made
    made.kill()


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubernetes]:
    """kubectl on the PATH, with a cluster that has nothing; no process of it outlives the test."""
    made = Kubernetes.install(tmp_path / "cluster")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("TPU_SLICES", "WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TPU_NAME": "grpo", "TPU_TYPE": "v5e-16", "TPU_IMAGE": "i:1"}.items():
        monkeypatch.setenv(name, value)
    yield made
    made.kill()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small git work tree whose program notes how it was called, sleeps, and fails where it is told to."""
    directory = tmp_path / "checkout"
    (directory / "scripts").mkdir(parents=True)
    (directory / "scripts" / "program.py").write_text(PROGRAM)
    (directory / ".gitignore").write_text("runs/\n.venv/\n")
    git(directory, "init", "--quiet")
    git(directory, "add", "-A")
    git(directory, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "one")
    return directory


@pytest.fixture
def ready(stand_in: StandIn, checkout: Path, capsys: pytest.CaptureFixture[str]) -> StandIn:
    """A slice with the small checkout on it."""
    assert main(["create", "--type", "v5e-8", "--how", "vm"]) == 0
    assert main(["setup", "--how", "vm", "--code", str(checkout)]) == 0
    capsys.readouterr()
    return stand_in


@pytest.fixture
def launch(capsys: pytest.CaptureFixture[str]) -> Launch:
    """Calls the command for a TPU VM, with a verb and more words; returns its code and what it prints."""

    def called(verb: str, *words: str) -> tuple[int, str, str]:
        code = main([verb, "--how", "vm", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return called


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("config of mine\n")
    return path


def git(directory: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(directory), *words], check=True, capture_output=True)
