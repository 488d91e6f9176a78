"""Runs of several processes: results do not depend on the number of processes, and hosts stay in lockstep."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.models.gemma4 import SHAPES, TWO_KINDS
from tests.several.runs import completed, lines, outcome, settings, write_files

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def one_run(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with four devices, and one decode step per launch."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    options = ("run.max_steps=2", "rollout.steps_per_launch=1", "export.every=last")
    completed(1, 4, files, settings(run_dir), *options)
    return run_dir


@pytest.fixture(scope="module")
def expected(one_run: Path) -> tuple[list[str], str]:
    """The digests of the tokens and of the last parameters of ``one_run``."""
    return outcome(one_run)


@pytest.mark.parametrize(("hosts", "devices"), [pytest.param(2, 2, marks=pytest.mark.slow), (4, 1)])
def test_tokens_and_parameters_are_those_of_one_process(
    files: Path, tmp_path: Path, one_run: Path, expected: tuple[list[str], str], hosts: int, devices: int
) -> None:
    """Results are equal bit for bit, with a learning rate at which any difference would change tokens."""
    options = ("run.max_steps=2", "export.every=last")
    ended = completed(hosts, devices, files, settings(tmp_path), *options, fault="shapes")
    assert outcome(tmp_path) == expected
    exports = [directory / "exports/2/model.safetensors" for directory in (tmp_path, one_run)]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    assert [path.name for path in exports[0].parents[1].iterdir()] == ["2"]  # nothing unfinished beside it
    progress = [line for line in ended.out.splitlines() if "step 2 of 2" in line]
    assert [line[:4] for line in progress] == ["[0] "]  # the others are quiet
    assert not [line for line in ended.errors.splitlines() if "tpu_grpo" in line], ended.errors
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == [f"host_{index}.log" for index in range(hosts)]
    for index in range(hosts):
        assert f"host {index} INFO tpu_grpo.host: update of step 2 ends after" in logs[f"host_{index}.log"]
    # the batch of 4 x 4 rows, of 12 + 6 tokens, is not doubled: what the loss is traced with on every host
    assert re.findall(r"traced rows (.*)", ended.out) == ["(16, 18) (16, 18) (16, 18)"] * hosts


@pytest.mark.slow
def test_a_model_that_is_not_there_is_taught_once(files: Path, tmp_path: Path) -> None:
    """One host teaches the model while it holds the cache's lock, and the other host waits for the lock."""
    data = {"path": "builtin:addition", "prompts_per_step": 4, "max_prompt_tokens": 12}
    tree = settings(tmp_path, model={"path": "builtin:addition"}, data=data, rewards=[{"name": "exact_answer"}])
    completed(2, 1, files, tree, timeout=550)
    assert len(outcome(tmp_path)[0]) == 2


TUNIX = {
    "name": "tunix:grpo",
    "options": {"beta": 0.01, "num_iterations": 2},
    "micro_batch_prompts": 2,
    "old_policy": "trainer",
}
"""A reference, a second forward pass, and gradients that add up over two passes."""
MINI = {"beta": 0.1, "old_policy": "trainer", "iterations": 2, "mini_batch_prompts": 2}
"""The old policy's and the reference's log-probabilities are gathered for all updates of a step."""
ADAPTERS: dict[str, Any] = {"model": {"lora": {"rank": 2}}, "checkpoint": {"every": 2}}


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"algorithm": TUNIX, "meshes": {"sampler": {"tensor": 2}}}, id="tunix"),
        pytest.param({"algorithm": TUNIX, **ADAPTERS}, id="tunix, adapters", marks=pytest.mark.slow),
        pytest.param({"algorithm": TUNIX, "meshes": {"layout": "split"}}, id="tunix, split", marks=pytest.mark.slow),
        pytest.param(
            {"algorithm": TUNIX, "model": {"dtype": "bfloat16", "remat": "decoder"}},
            id="tunix, bfloat16",
            marks=pytest.mark.slow,
        ),
        pytest.param({"algorithm": MINI}, id="mini-batches", marks=pytest.mark.slow),
        pytest.param({**ADAPTERS, "meshes": {"probe_every": 1}}, id="adapters", marks=pytest.mark.slow),
    ],
)
def test_two_processes_learn_what_one_does(files: Path, tmp_path: Path, sections: dict[str, Any]) -> None:
    completed(1, 4, files, settings(tmp_path / "1", **sections))
    completed(2, 2, files, settings(tmp_path / "2", **sections))
    for run_dir in (tmp_path / "1", tmp_path / "2"):
        if "checkpoint" in sections:
            assert sorted(path.name for path in (run_dir / "adapters").iterdir()) == ["2"]
    assert outcome(tmp_path / "2") == outcome(tmp_path / "1")


@pytest.mark.slow
def test_trainer_and_sampler_on_halves_of_one_host(
    files: Path, tmp_path: Path, expected: tuple[list[str], str]
) -> None:
    """Trainer and sampler have two devices each; in test_split.py they have hosts of their own."""
    meshes = {"layout": "split", "sampler": {"tensor": 2}}
    completed(1, 4, files, settings(tmp_path, meshes=meshes), "hosts.check=step")
    assert outcome(tmp_path)[0][0] == expected[0][0]


ONE_AND_TWO = (("shared", 1), ("shared", 2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("shape", "dtype", "layouts"),
    [
        (
            {"kv_heads": 1, "model_type": "gemma3_text", "layers": 3, "sliding_window": 7, "scale": 0.3},
            "float32",
            (*ONE_AND_TWO, ("shared", 4), ("split", 2), ("split", 4)),
        ),
        (SHAPES["31b"] | TWO_KINDS, "float32", (*ONE_AND_TWO, ("split", 2))),
        (SHAPES["26b"] | TWO_KINDS, "bfloat16", ONE_AND_TWO),  # the engine's experts are replayed
    ],
    ids=["gemma 3", "gemma 4", "gemma 4 with experts"],
)
def test_gemma_is_the_same_on_several_processes_and_on_halves_of_the_devices(
    tmp_path: Path, shape: dict[str, Any], dtype: str, layouts: Sequence[tuple[str, int]]
) -> None:
    """With windows shorter than the rows. Halves sum gradients in another order."""
    files = write_files(tmp_path / "files", **(dict[str, Any](model_type="gemma4_text", scale=0.12) | shape))
    found: dict[str, list[tuple[list[str], str]]] = {"shared": [], "split": []}
    for layout, hosts in layouts:
        run_dir = tmp_path / f"{layout}{hosts}"
        meshes = {"layout": layout, "sampler": {"tensor": 2}, "probe_every": 1}
        completed(hosts, 4 // hosts, files, settings(run_dir, meshes=meshes, model={"path": "model", "dtype": dtype}))
        assert all(line["update/grad_norm"] for line in lines(run_dir))
        found[layout].append(outcome(run_dir))
    for each in found.values():
        assert all(outcome == each[0] for outcome in each)
    assert all(outcome[0][0] == found["shared"][0][0][0] for outcome in found["split"])


@pytest.mark.parametrize("tensor", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_in_step_when_the_cache_is_so_small_that_prefixes_are_evicted_and_requests_put_back(
    files: Path, tmp_path: Path, expected: tuple[list[str], str], tensor: int
) -> None:
    """The engines' memory is freed during the updates, which changes no token either."""
    cache = {4: 44, 2: 28}[tensor]  # two replicas have half as many requests each
    rollout = {"kv_tokens": cache, "max_new_tokens": 6, "prefill_tokens": 16, "batch_paddings": [16]}
    rollout |= {"release_during_update": True}
    tree = settings(tmp_path, meshes={"sampler": {"tensor": tensor}}, rollout=rollout)
    ended = completed(2, 2, files, tree, "hosts.check=step", fault="pressure")
    assert outcome(tmp_path)[0][0] == expected[0][0]
    for what in ("put back", "evicted"):
        counts = re.findall(rf"{what} (\d+)", ended.out)
        assert len(counts) == 2
        assert min(map(int, counts)) > 0, ended.out
