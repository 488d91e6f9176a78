"""Trainer and sampler on different hosts: tokens and parameters equal those of a shared run on the trainer's mesh."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import SOON, completed, lines, outcome, run_hosts, settings, write_files
from tests.talking import SIZES, write_talking_files

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(1200)]
THREE: dict[str, Any] = {"hidden": 48, "heads": 6, "kv_heads": 6, "head_dim": 12, "intermediate": 96}
"""Sizes of a model that three devices divide."""


def split(hosts: int | None = None, tensor: int = 1) -> dict[str, Any]:
    return {"layout": "split", "sampler": {"hosts": hosts, "tensor": tensor}, "probe_every": 1}


def shared_run(files: Path, run_dir: Path, devices: int, tensor: int, *words: str, **sections: Any) -> None:
    """Run one process that has as many devices as the trainer of the split run."""
    tree = settings(run_dir, meshes={"sampler": {"tensor": tensor}}, **sections)
    completed(1, devices, files, tree, *words)


def test_a_host_that_trains_and_one_that_samples(files: Path, tmp_path: Path) -> None:
    """With an evaluation and an export. The next test has a continued start."""
    evaluation = {"path": "held.jsonl", "every": 2}
    shared_run(files, tmp_path / "one", 1, 1, "export.every=last", evaluation=evaluation)
    completed(2, 1, files, settings(tmp_path / "two", meshes=split(), evaluation=evaluation), "export.every=last")
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")
    assert lines(tmp_path / "two", "evaluation.jsonl") == lines(tmp_path / "one", "evaluation.jsonl")
    exports = [tmp_path / name / "exports/2/model.safetensors" for name in ("one", "two")]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    logs = [(tmp_path / "two/logs" / f"host_{index}.log").read_text() for index in (0, 1)]
    assert all("update of step 2 ends after" in log for log in logs)  # the sampler's host waits for it


@pytest.mark.parametrize(
    ("trainers", "samplers", "carry", "rounds", "talks"),
    [
        (1, 1, 0.0, 1, False),
        pytest.param(1, 1, 0.0, 1, True, marks=pytest.mark.slow),
        pytest.param(2, 2, 0.5, 1, False, marks=pytest.mark.slow),
        pytest.param(3, 1, 0.0, 1, False, marks=pytest.mark.slow),
        pytest.param(1, 1, 0.0, 2, False, marks=pytest.mark.slow),
        pytest.param(1, 1, 0.5, 2, False, marks=pytest.mark.slow),
    ],
)
def test_one_step_off_is_a_shared_run_with_late_weights(
    tmp_path: Path, trainers: int, samplers: int, carry: float, rounds: int, talks: bool
) -> None:
    """This also holds when the run continues after step 2, whose checkpoint has the completions for step 3.

    Without carry, only a run that is one step off keeps complete groups that dynamic sampling did not use.
    """
    sizes: dict[str, Any] = THREE if trainers == 3 else {"layers": 1}
    files = write_talking_files(tmp_path / "files") if talks else write_files(tmp_path / "files", **sizes)
    data = {"path": "data.jsonl", "prompts_per_step": 3 if trainers == 3 else 4, "max_prompt_tokens": 12}
    more: dict[str, Any] = {
        "rollout": {"partial_extra": carry, "max_new_tokens": 24},
        "checkpoint": {"every": 1, "keep": 9},
    }
    more["data"] = data | {"dynamic": {"rounds": rounds}}
    if talks:
        more |= SIZES
    if rounds > 1:  # some groups have equal rewards
        more["rewards"] = [{"name": "rewards.py:any_digit", "workers": 0}]
    late = settings(tmp_path / "late", meshes={"sampler": {"tensor": 1}, "probe_every": 0}, **more)
    completed(1, trainers, files, late, "run.max_steps=4", fault="late_weights")
    run_dir, hosts = tmp_path / "ahead", trainers + samplers
    tree = settings(run_dir, meshes=split(samplers), algorithm={"group_size": 4, "staleness": 1}, **more)
    expected = outcome(tmp_path / "late")
    for kept in (4, 2):
        if kept == 2:  # as after a kill
            for step in (3, 4):
                shutil.rmtree(run_dir / "checkpoints" / str(step))
            (run_dir / "summary.json").unlink()
        completed(hosts, 1, files, tree, "run.max_steps=4", fault="unknown_lengths")
        if rounds > 1 and not carry and kept == 4:
            expected = outcome(run_dir)
        same = 2 if hosts == 2 else 1  # several engines or trainers round otherwise: then only the tokens
        assert outcome(run_dir)[:same] == expected[:same]
        steps = lines(run_dir)
        gaps = [line.get("agreement/logprob_abs_diff_mean") for line in steps]
        assert [gap is None for gap in gaps] == [False, False, kept == 2, False]
        assert all(gap is None or gap < 1e-5 for gap in gaps)
        assert all(line["agreement/older_logprob_abs_diff_mean"] > 1e-3 for line in steps[1:])
        assert rounds == 1 or max(line["groups/rounds"] for line in steps) == rounds
    if rounds == 1:
        sampling = stage_times(run_dir, hosts - 1, "rollout of step 4")
        learning = stage_times(run_dir, 0, "update of step 3")
        assert sampling[0] < learning[1]
        assert learning[0] < sampling[1]


def stage_times(run_dir: Path, host: int, stage: str) -> list[str]:
    """Return the times at which a host last began and ended a stage, from its log."""
    logged = (run_dir / "logs" / f"host_{host}.log").read_text().splitlines()
    return [[line[:23] for line in logged if f"{stage} {event}" in line][-1] for event in ("begins", "ends")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainers", "devices", "tensor", "sections"),
    [
        (2, 1, 1, {}),
        (2, 1, 2, {"model": {"lora": {"rank": 2}}}),
        (2, 2, 4, {}),
        (3, 1, 1, {"data": {"prompts_per_step": 3}}),
    ],
)
def test_two_or_three_of_four_hosts_train_and_the_others_sample(
    tmp_path: Path, trainers: int, devices: int, tensor: int, sections: dict[str, Any]
) -> None:
    """The hosts that sample have a replica each, or one that spans both, then with adapters."""
    sizes: dict[str, Any] = THREE if trainers == 3 else {"layers": 1}
    files = write_files(tmp_path / "files", **sizes)
    shared_run(files, tmp_path / "one", trainers * devices, tensor, **sections)
    tree = settings(tmp_path / "four", meshes=split(4 - trainers, tensor), checkpoint={"every": 1}, **sections)
    completed(4, devices, files, tree, "hosts.check=step", timeout=1100)
    assert outcome(tmp_path / "four") == outcome(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "stage", "staleness"),
    [(1, "rollout of step 2", 0), (2, "update of step 2", 0), (1, "update of step 2", 1), (2, "rollout of step 3", 1)],
)
def test_a_lost_host_of_either_role_is_named(
    files: Path, tmp_path: Path, lost: int, stage: str, staleness: int
) -> None:
    """Hosts 0 and 1 train, and host 2 samples; without staleness, the lost one has nothing to do in the stage."""
    algorithm = {"group_size": 4, "staleness": staleness}
    tree = settings(tmp_path, run={"max_steps": 4}, meshes=split(1), algorithm=algorithm, **SOON)
    ended = run_hosts(3, 1, files, tree, fault=f"lost@{lost}:SIGKILL,{stage}", grace=25)
    assert f"LockstepError: lost host {lost}: " in ended.of_host(0), ended.errors
    for other in {0, 1, 2} - {lost}:
        assert f"host {other} ended with exit code 3" in ended.errors


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("fault", ["gathered_token@0", "gathered_token@1"])
@pytest.mark.slow
def test_hosts_of_both_roles_agree_on_the_tokens(files: Path, tmp_path: Path, fault: str, staleness: int) -> None:
    algorithm = {"group_size": 4, "staleness": staleness}
    ended = run_hosts(2, 1, files, settings(tmp_path, meshes=split(), algorithm=algorithm), fault=fault)
    assert ended.code == 3
    assert "tokens of step 1 differs" in ended.errors
