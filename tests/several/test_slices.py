"""Two slices, each made of one process or two, learn what one process learns from the same global batch.

Slices have two devices each, as the process to which they are compared: with one, XLA on CPUs rounds otherwise.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import completed, lines, outcome, run_hosts, settings, written
from tpu_grpo.config import load_config

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(1200)]
PARAMETER = "layers.0.attn.q_norm.w"


def two_passes(run_dir: Path, slices: int = 1, **sections: Any) -> dict[str, Any]:
    """A run whose updates have two micro-batches, one for each of two slices; a sum of two has one order."""
    algorithm = {"group_size": 4, "micro_batch_prompts": 2} | sections.pop("algorithm", {})
    meshes = {"slices": slices, "sampler": {"tensor": 1}, "probe_every": 1} | sections.pop("meshes", {})
    return settings(run_dir, algorithm=algorithm, meshes=meshes, **sections)


def learnt(run_dir: Path) -> list[dict[str, float]]:
    """What the updates measured, without seconds, and without the probe, which has a completion per replica."""
    kept, out = ("update/", "agreement/", "correction/"), ("update/seconds", "agreement/probe")
    return [{k: v for k, v in line.items() if k.startswith(kept) and k not in out} for line in lines(run_dir)]


def test_two_slices_learn_what_one_learns(files: Path, tmp_path: Path) -> None:
    """Bit for bit, also where the run continues after a checkpoint, which only the first slice saves."""
    tensor = "meshes.sampler.tensor=2"
    completed(1, 2, files, two_passes(tmp_path / "one"), "run.max_steps=3", tensor)
    tree = two_passes(tmp_path / "two", slices=2, checkpoint={"every": 2})
    for words in (["run.max_steps=2"], ["run.max_steps=3", "checkpoint.resume=require"]):
        completed(2, 2, files, tree, tensor, *words)
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")
    assert learnt(tmp_path / "two") == learnt(tmp_path / "one")


def test_a_slice_whose_parameters_differ_is_named(files: Path, tmp_path: Path) -> None:
    ended = run_hosts(2, 1, files, two_passes(tmp_path, slices=2), fault=f"trainer_parameter:{PARAMETER}")
    assert ended.code == 3, ended.errors
    for host in (0, 1):
        assert "parameters of the slices differs: host 0 (slice 0) has sha256 " in ended.of_host(host), ended.errors
        assert "host 1 (slice 1) has sha256 " in ended.of_host(host)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {"micro_batch_prompts": 1, "mini_batch_prompts": 2, "iterations": 2, "old_policy": "trainer"},
        {"beta": 0.1, "kl_in": "reward"},
    ],
    ids=["mini_batches", "kl_in_reward"],
)
def test_numbers_that_an_update_needs_are_those_of_all_slices(
    files: Path, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    for hosts in (1, 2):
        completed(hosts, 2, files, two_passes(tmp_path / str(hosts), slices=hosts, algorithm=algorithm))
    assert outcome(tmp_path / "2") == outcome(tmp_path / "1")
    assert learnt(tmp_path / "2") == learnt(tmp_path / "1")


@pytest.mark.slow
def test_two_slices_learn_from_shared_prompts_what_one_learns(files: Path, tmp_path: Path) -> None:
    """A row has room for a prompt of 12 tokens and the 4 completions of a group: 4 rows, in two micro-batches.

    In rows of 70 tokens or more, XLA on CPUs rounds otherwise in each slice, whether or not prompts are shared.
    """
    questions = [f'{{"question": "{"1+" * 4}{n}=", "answer": "1"}}\n' for n in range(8)]
    (files / "long.jsonl").write_text("".join(questions))
    for slices in (1, 2):
        data, algorithm = {"path": "long.jsonl"}, {"row_tokens": 12 + 6 + 3 * 7}
        tree = two_passes(tmp_path / str(slices), slices, data=data, algorithm=algorithm)
        assert load_config(written(tree)).update_rows == 4  # 8 if no prompt was shared
        completed(slices, 2, files, tree)
    assert outcome(tmp_path / "2") == outcome(tmp_path / "1")
    assert learnt(tmp_path / "2") == learnt(tmp_path / "1")


@pytest.mark.slow
def test_three_micro_batches_leave_a_slice_one_without_tokens(files: Path, tmp_path: Path) -> None:
    """In another order of the sums, so only the first step's tokens are equal for sure, and figures up to rounding."""
    data = {"path": "data.jsonl", "prompts_per_step": 3, "max_prompt_tokens": 12}
    for hosts in (1, 2):
        algorithm = {"micro_batch_prompts": 1}
        completed(hosts, 2, files, two_passes(tmp_path / str(hosts), hosts, algorithm=algorithm, data=data))
    assert outcome(tmp_path / "2")[0][0] == outcome(tmp_path / "1")[0][0]
    two, one = learnt(tmp_path / "2")[0], learnt(tmp_path / "1")[0]
    assert two == pytest.approx(one, rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_slices_that_split_their_hosts_and_sample_one_step_ahead(files: Path, tmp_path: Path) -> None:
    """Two hosts a slice: one trains, one samples. Also with a checkpoint of the groups that are ahead."""
    for slices in (1, 2):
        meshes = {"layout": "split", "slices": slices}
        tree = two_passes(
            tmp_path / str(slices), slices, algorithm={"staleness": 1}, meshes=meshes, checkpoint={"every": 1}
        )
        for words in (["run.max_steps=2"], ["run.max_steps=4", "checkpoint.resume=require"]):
            completed(2 * slices, 2, files, tree, *words, timeout=1100)
    assert outcome(tmp_path / "2") == outcome(tmp_path / "1")


@pytest.mark.slow
def test_a_lost_slice_is_named(files: Path, tmp_path: Path) -> None:
    tree = two_passes(tmp_path, slices=2, hosts={"lost_timeout_seconds": 12, "start_timeout_seconds": 60})
    ended = run_hosts(2, 1, files, tree, fault="lost:SIGKILL,update of step 2", grace=25)
    assert "LockstepError: lost host 1 (slice 1): " in ended.of_host(0), ended.errors
