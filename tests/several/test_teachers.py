"""Teachers on several processes: tokens, parameters and distances are those of one, also after a kill."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.models.random_checkpoint import edit_config
from tests.several.runs import SOON, completed, laid_over, lines, outcome, run_hosts, settings, write_files

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with a teacher of another size, whose models end a completion after about 20 tokens on average."""
    directory = write_files(tmp_path_factory.mktemp("taught"), layers=1)
    other = write_files(tmp_path_factory.mktemp("other"), layers=2, seed=9)
    (other / "model").rename(directory / "teacher")
    for name in ("model", "teacher"):
        edit_config(directory / name, eos_token_id=[*range(10, 22)])
    return directory


def tree(run_dir: Path, **sections: Any) -> dict[str, Any]:
    """A teacher that is kept in the host's memory, and a moving average with a hint; completions are carried over."""
    rollout = {"max_new_tokens": 32, "partial_extra": 0.5, "prefill_tokens": 64, "batch_paddings": [8]}
    own = {"hint": "The answer is {answer}.", "max_prompt_tokens": 48, "update_rate": 0.1, "weight": 0.5}
    of_all = settings(
        run_dir,
        run={"max_steps": 3},
        rollout=rollout | {"max_running_requests": 8},
        rewards=[],
        teachers=[{"path": "teacher", "offload": True}, own],
        algorithm={"name": "distill", "group_size": 1},
        checkpoint={"every": 1},
    )
    return laid_over(of_all, sections)


def distances(run_dir: Path) -> list[dict[str, float]]:
    return [{n: v for n, v in line.items() if n.startswith("teachers/") and "/kl" in n} for line in lines(run_dir)]


@pytest.mark.parametrize(("hosts", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_teachers_say_the_same_on_several_processes_and_after_a_kill(
    taught: Path, tmp_path: Path, hosts: int, devices: int
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    options = "run.max_steps=2", f"meshes.sampler.tensor={devices}"
    completed(1, 4, taught, tree(one), *options)
    assert {"teachers/teacher/kl", "teachers/self/kl"} <= distances(one)[-1].keys()
    killed = run_hosts(hosts, devices, taught, tree(several) | SOON, *options, fault="lost:SIGKILL,update of step 2")
    assert "LockstepError: lost host 1: " in killed.of_host(0), killed.errors
    assert "continuing after step 1" in completed(hosts, devices, taught, tree(several), *options).out
    assert outcome(several) == outcome(one)
    assert distances(several) == distances(one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "name", "staleness", "offload"),
    [(1, "distill", 0, False), (2, "gkd", 0, True), (2, "distill", 1, False), (4, "gkd", 1, False)],
)
def test_a_teacher_on_the_samplers_hosts_says_the_same(
    taught: Path, tmp_path: Path, hosts: int, name: str, staleness: int, offload: bool
) -> None:
    """One process halves its two devices; of several, half sample, and run the teacher; also as after a kill."""
    devices = 2 if hosts == 1 else 1
    for place in ("trainer", "sampler"):
        options = {"top_k": 8} if name == "gkd" else {}
        sections = tree(
            tmp_path / place,
            teachers=[{"path": "teacher", "mesh": place, "offload": offload and place == "sampler"}],
            algorithm={"name": name, "options": options, "group_size": 1, "staleness": staleness},
            meshes={"layout": "split"},
        )
        completed(hosts, devices, taught, sections)
    one, other = (tmp_path / place for place in ("trainer", "sampler"))
    assert (outcome(other), distances(other)) == (outcome(one), distances(one))
    shutil.rmtree(other / "checkpoints" / "3")
    (other / "summary.json").unlink()
    completed(hosts, devices, taught, sections)
    assert (outcome(other), distances(other)) == (outcome(one), distances(one))
