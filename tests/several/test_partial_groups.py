"""Completions that are carried over, on several hosts: hosts tell each other which completions have ended."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.models.gemma4 import SHAPES, TWO_KINDS
from tests.models.random_checkpoint import edit_config
from tests.several.runs import SOON, completed, lines, outcome, run_hosts, settings, write_files

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def tailed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files whose model ends a completion after about 20 tokens on average."""
    directory = write_files(tmp_path_factory.mktemp("tailed"), layers=1)
    edit_config(directory / "model", eos_token_id=[*range(10, 22)])
    return directory


def carrying(run_dir: Path, tensor: int = 1) -> dict[str, Any]:
    rollout = {"max_new_tokens": 64, "partial_extra": 0.5, "prefill_tokens": 64, "batch_paddings": [8]}
    return settings(
        run_dir,
        run={"max_steps": 3},
        rollout=rollout | {"max_running_requests": 8},
        meshes={"sampler": {"tensor": tensor}},
    )


@pytest.mark.parametrize(
    ("hosts", "devices", "tensor"),
    [(2, 2, 2), pytest.param(4, 1, 1, marks=pytest.mark.slow), pytest.param(2, 2, 4, marks=pytest.mark.slow)],
)
def test_tokens_and_parameters_are_those_of_one_process(
    tailed: Path, tmp_path: Path, hosts: int, devices: int, tensor: int
) -> None:
    """A host stops its rows by the ended completions it knows of so far; with tensor 4 one replica spans both hosts."""
    one, several = tmp_path / "one", tmp_path / "several"
    completed(1, 4, tailed, carrying(one, tensor))
    assert any(line["partial/length_saved"] for line in lines(one))
    completed(hosts, devices, tailed, carrying(several, tensor), "hosts.check=step", timeout=800)
    assert outcome(several) == outcome(one)


@pytest.mark.slow
def test_a_host_that_only_samples_resumes_the_groups_of_a_checkpoint(tailed: Path, tmp_path: Path) -> None:
    completed(1, 1, tailed, carrying(tmp_path / "one"), timeout=800)
    tree = carrying(tmp_path / "two") | {"meshes": {"layout": "split"}, "checkpoint": {"every": 1}}
    for steps in (2, 3):
        completed(2, 1, tailed, tree, f"run.max_steps={steps}", timeout=800)
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text"])
def test_layers_that_keep_only_their_window_carry_completions_over_a_kill(tmp_path: Path, family: str) -> None:
    """Two hosts of which one is killed end as one process does; Gemma 4's model has experts."""
    shape: dict[str, Any] = {"gemma3_text": {}, "gemma4_text": SHAPES["26b"]}[family]
    files = write_files(tmp_path / "files", model_type=family, **shape | TWO_KINDS | {"scale": 0.12})
    edit_config(files / "model", eos_token_id=[*range(10, 22)])
    tree = {name: carrying(tmp_path / name) | {"checkpoint": {"every": 1}} for name in ("one", "two")}
    words = ["rollout.steps_per_launch=2"]
    assert "pages of windows were taken" in completed(1, 4, files, tree["one"], *words, fault="windows").out
    assert any(line["partial/length_saved"] and line["update/grad_norm"] for line in lines(tmp_path / "one"))
    killed = run_hosts(2, 2, files, tree["two"] | SOON, *words, fault="lost:SIGKILL,rollout of step 3")
    assert "LockstepError: lost host 1: " in killed.of_host(0), killed.errors
    continued = completed(2, 2, files, tree["two"], *words).out
    assert re.search("continuing after step [12]", continued)  # a checkpoint is saved while the next step begins
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")
