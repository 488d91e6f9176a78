"""Several processes: the same rewards from worker processes, the same prompts of a mixture, the same evaluations."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import REPOSITORY, completed, lines, run_hosts, settings

pytestmark = [pytest.mark.several_hosts, pytest.mark.timeout(600)]

MADE = """
def sums(size, first=20):
    return [{"question": f"{n}+2=", "answer": str(n + 2), "level": n % 3} for n in range(first, first + size)]
"""
DRAWN = """
import random

def sums(size):
    return [{"question": f"{random.random():.3f}", "answer": "1", "level": 0} for _ in range(size)]
"""
SOURCES = [
    {"path": "levels.csv", "weight": 2, "columns": {"question": "problem"}},
    {"path": "made.py:sums", "options": {"size": 15}, "name": "made"},
]
EVALUATION = {"path": "held.jsonl", "prompts": 5, "samples": 3, "every": 1}
WORKERS = [
    {"name": "rewards.py:ascii_share", "workers": 1, "early": True},
    {"name": "exact_answer", "workers": 2},
    {"name": "rewards.py:odd_on_host_1", "workers": 1, "weight": 0.1, "only_if": "exact_answer"},
]
"""Each reward has its own processes. The last reward would differ on host 1, but not in workers, which are started
without the command line."""


@pytest.fixture(scope="module")
def sources(files: Path) -> Path:
    rows = "".join(f"{n}+3=,{n + 3},{n % 4}\n" for n in range(30))
    (files / "levels.csv").write_text(f"problem,answer,level\n{rows}")
    (files / "made.py").write_text(MADE)
    return files


def tree(run_dir: Path, **sections: Any) -> dict[str, Any]:
    data = {"path": "builtin:addition", "sources": SOURCES, "curriculum": "level"}
    given = {"data": data, "evaluation": EVALUATION, "rewards": WORKERS, "logging": {"samples_every": 1}}
    return settings(run_dir, meshes={"sampler": {"tensor": 2}}, **(given | sections))  # an engine a host


@pytest.fixture(scope="module")
def runs(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same run by one process and by two."""
    found = {hosts: tmp_path_factory.mktemp("run") / str(hosts) for hosts in (1, 2)}
    completed(1, 4, sources, tree(found[1]), "rollout.steps_per_launch=1")
    completed(2, 2, sources, tree(found[2]), "rollout.steps_per_launch=3")  # which changes nothing
    return found


def test_two_processes_give_the_rewards_of_one(runs: dict[int, Path]) -> None:
    one, two = ([(s["prompt"], s["completion"], s["rewards"]) for s in lines(runs[n], "samples.jsonl")] for n in (1, 2))
    assert len(one) == 2 * 16
    assert one == two
    assert {name for _, _, rewards in one for name in rewards} == {"ascii_share", "exact_answer", "odd_on_host_1"}
    assert len({rewards["ascii_share"] for _, _, rewards in one}) > 3  # values that could differ


def test_two_processes_give_the_evaluations_of_one(runs: dict[int, Path]) -> None:
    one, two = (lines(runs[n], "evaluation.jsonl") for n in (1, 2))
    assert [line["step"] for line in one] == [0, 1, 2]
    assert one == two
    for step in (0, 1, 2):
        kept = [(runs[n] / "evaluations" / f"{step}.jsonl").read_bytes() for n in (1, 2)]
        assert kept[0] == kept[1]
    assert (runs[1] / "data.json").read_text() == (runs[2] / "data.json").read_text()


def test_a_checkpoint_is_evaluated_on_several_hosts(sources: Path, runs: dict[int, Path]) -> None:
    evaluates = [str(REPOSITORY / "scripts" / "eval.py")]
    ended = completed(2, 1, sources, tree(runs[2]), "--checkpoint=latest", program=evaluates)
    shown = [line for line in ended.out.splitlines() if "checkpoint_2" in line]
    assert shown
    assert all(line.startswith("[0] ") for line in shown)  # the others are quiet
    written = json.loads((runs[2] / "evaluations" / "checkpoint_2.json").read_text())
    assert written == lines(runs[1], "evaluation.jsonl")[2]


def test_a_function_that_returns_other_records_on_every_host_is_found(sources: Path, tmp_path: Path) -> None:
    (sources / "drawn.py").write_text(DRAWN)
    data = {"path": "drawn.py:sums", "sources": [], "options": {"size": 9}, "curriculum": None}
    ended = run_hosts(2, 1, sources, tree(tmp_path, data=data))
    assert ended.code == 3, ended.errors
    assert "prompts of drawn.py:sums differs" in ended.errors
