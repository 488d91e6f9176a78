"""Completions that are carried over, on several hosts: hosts tell each other which completions have ended."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.random_checkpoint import edit_config
from tests.several.runs import completed, lines, one_process, outcome, settings, write_files

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


@pytest.fixture(scope="module")
def alone(tailed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    one_process(tailed, carrying(run_dir))
    assert any(line["partial/length_saved"] for line in lines(run_dir))
    return outcome(run_dir)


@pytest.mark.parametrize(
    ("hosts", "devices", "tensor"),
    [(2, 2, 1), pytest.param(4, 1, 1, marks=pytest.mark.slow), pytest.param(2, 2, 4, marks=pytest.mark.slow)],
)
def test_tokens_and_parameters_are_those_of_one_process(
    tailed: Path, tmp_path: Path, alone: tuple[list[str], str], hosts: int, devices: int, tensor: int
) -> None:
    """A host stops its rows by the ended completions it knows of so far; with tensor 4 one replica spans both hosts."""
    completed(hosts, devices, tailed, carrying(tmp_path, tensor), "hosts.check=step", timeout=800)
    if tensor == 1:
        assert outcome(tmp_path) == alone
    else:
        assert outcome(tmp_path)[0][0] == alone[0][0]  # sums over 4 devices have another order


@pytest.mark.slow
def test_a_host_that_only_samples_resumes_the_groups_of_a_checkpoint(tailed: Path, tmp_path: Path) -> None:
    completed(1, 1, tailed, carrying(tmp_path / "one"), timeout=800)
    tree = carrying(tmp_path / "two") | {"meshes": {"layout": "split"}, "checkpoint": {"every": 1}}
    for steps in (2, 3):
        completed(2, 1, tailed, tree, f"run.max_steps={steps}", timeout=800)
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")
