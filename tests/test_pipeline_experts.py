"""Whole runs of a model with experts, whose routing is replayed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import outcome, run_hosts, settings, write_files
from tpu_grpo.config import parse_config
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.abstract import open_abstract_checkpoint
from tpu_grpo.run.pipeline import train


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"), model_type="qwen3_moe")


def tree(run_dir: Path, *, steps: int = 2, **algorithm: Any) -> dict[str, Any]:
    run = {"dir": str(run_dir), "max_steps": steps, "seed": 5}
    meshes = {"trainer": {"fsdp": 4}, "sampler": {"tensor": 2}, "probe_every": 1}
    replaying = {"group_size": 4, "routing_replay": True, **algorithm}
    return settings(run_dir, run=run, meshes=meshes, algorithm=replaying, checkpoint={"every": 1})


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("section", "setting"), [("algorithm", "routing_replay=true"), ("rollout", "experts=fused")])
def test_settings_of_experts_are_refused_for_other_models(section: str, setting: str) -> None:
    name, value = setting.split("=")
    config = parse_config({section: {name: value}})
    refused = pytest.raises(ConfigError, match=f"{section}.{setting} needs a model with experts, got a qwen3; leave it")
    with refused, open_abstract_checkpoint(config):
        pass


@pytest.mark.slow
def test_a_run_that_replays_routing_goes_on_where_it_was_left(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an evaluation's and a probe's requests between, and nothing compiled after the second step."""
    monkeypatch.chdir(files)
    held_out = {"path": "held.jsonl", "every": 1, "prompts": 4}
    whole = train(parse_config(tree(tmp_path / "whole", steps=3) | {"evaluation": held_out}))
    metrics = lines(tmp_path / "whole")
    assert max(m["agreement/logprob_abs_diff_max"] for m in metrics) <= 1e-4
    assert metrics[1]["compile/count"] == metrics[2]["compile/count"]
    for steps in (2, 3):
        parts = train(parse_config(tree(tmp_path / "parts", steps=steps) | {"evaluation": held_out}))
    assert parts["params_digest"] == whole["params_digest"]


@pytest.mark.several_hosts
@pytest.mark.timeout(600)
def test_experts_reach_the_trainer_of_every_host(files: Path, tmp_path: Path) -> None:
    """Two replicas, of one host or of two, bring the trainer the same experts."""
    found = []
    for hosts, devices in ((1, 4), (2, 2)):
        run_dir = tmp_path / str(hosts)
        ended = run_hosts(hosts, devices, files, tree(run_dir))
        assert ended.code == 0, ended.errors
        found.append(outcome(run_dir))
        assert max(m["agreement/logprob_abs_diff_max"] for m in lines(run_dir)) <= 1e-4
    assert found[0] == found[1]
