"""Whole runs of other models and settings: adapters, some layers, experts whose routing is replayed, Gemma, filters."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.several.runs import completed, lines, outcome, settings, train, write_files
from tpu_grpo.cli.dry_run import check
from tpu_grpo.config import RunConfig, load_config, parse_config
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.abstract import open_abstract_checkpoint
from tpu_grpo.run.fingerprints import fingerprints
from tpu_grpo.run.inputs import check_model, open_inputs

DEMO = Path(__file__).parents[1] / "configs" / "demo_cpu.yaml"
LORA = {"rank": 2, "layers": "1"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("experts"), model_type="qwen3_moe")


@pytest.fixture(autouse=True)
def in_the_directory_of_the_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def config(run_dir: Path, *, steps: int = 2, **model: Any) -> RunConfig:
    meshes, run = {"sampler": {"tensor": 4}, "probe_every": 1}, {"max_steps": steps}
    tree = settings(run_dir, run=run, meshes=meshes, checkpoint={"every": 1})
    return parse_config(tree | {"model": tree["model"] | model})


def replaying(files: Path, run_dir: Path, *, steps: int = 2) -> dict[str, Any]:
    """Its path of the model is absolute, because tokenizers and configs are kept by path within a process."""
    meshes = {"trainer": {"fsdp": 4}, "sampler": {"tensor": 2}, "probe_every": 1}
    algorithm, run = {"routing_replay": True}, {"max_steps": steps}
    model = {"path": str(files / "model")}
    return settings(run_dir, model=model, run=run, meshes=meshes, algorithm=algorithm, checkpoint={"every": 1})


@pytest.mark.slow
def test_a_run_with_adapters_goes_on_and_is_a_start_for_others(tmp_path: Path) -> None:
    whole = train(config(tmp_path / "whole", lora=LORA))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for name in ("checkpoints", "adapters"):  # as if it had been killed in step 2
        shutil.rmtree(tmp_path / "parts" / name / "2")
    parts = train(config(tmp_path / "parts", lora=LORA))
    assert parts["params_digest"] == whole["params_digest"]
    metrics = lines(tmp_path / "whole")
    assert [m["rollout/tokens_digest"] for m in metrics] == [
        m["rollout/tokens_digest"] for m in lines(tmp_path / "parts")
    ]
    assert max(m["agreement/logprob_abs_diff_max"] for m in metrics) <= 1e-4  # adapted trainer, merged sampler
    adapters = tmp_path / "whole/adapters"
    assert sorted(path.name for path in adapters.iterdir()) == ["1", "2"]
    tensors = {step: load_file(adapters / step / "adapter_model.safetensors") for step in "12"}
    for name, value in tensors["2"].items():
        np.testing.assert_array_equal(value, load_file(tmp_path / "parts/adapters/2/adapter_model.safetensors")[name])
    assert any((tensors["1"][name] != value).any() for name, value in tensors["2"].items())
    started = config(tmp_path / "next", steps=1, lora=LORA | {"path": str(adapters / "2")})
    train(started)
    first = lines(tmp_path / "next")[0]["rollout/tokens_digest"]  # step 1's prompts and keys, but other weights
    assert first != metrics[0]["rollout/tokens_digest"]
    compared = fingerprints(started).keys()
    assert {"adapter file adapter_config.json", "adapter file adapter_model.safetensors"} <= compared


def test_what_the_model_lacks_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"train_layers": "1-2"}, r"model.train_layers must name layers .* which has 2 \(0-1\), got 1-2"),
        ({"lora": {"rank": 2, "layers": "0,9"}}, r"model.lora.layers must name layers .* which has 2 \(0-1\), got 0,9"),
        ({"lora": {"rank": 2, "targets": "query"}}, r"model.lora.targets must be found in .*attn.q_proj"),
    ]
    for model, expected in cases:
        with pytest.raises(ConfigError, match=expected):
            check(open_inputs(config(tmp_path / "run", **model)))


def test_a_replay_of_experts_is_refused_for_other_models() -> None:
    config = parse_config({"algorithm": {"routing_replay": True}})
    refused = pytest.raises(ConfigError, match="routing_replay=true needs a model with experts, got a qwen3; leave it")
    with open_abstract_checkpoint(config.model) as checkpoint, refused:
        check_model(config, checkpoint)


@pytest.mark.slow
def test_a_run_that_replays_routing_goes_on_where_it_was_left(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an evaluation's and a probe's requests between, and nothing compiled after the second step."""
    monkeypatch.chdir(experts)
    held_out = {"path": "held.jsonl", "every": 1, "prompts": 4}
    whole = train(parse_config(replaying(experts, tmp_path / "whole", steps=3) | {"evaluation": held_out}))
    metrics = lines(tmp_path / "whole")
    assert max(m["agreement/logprob_abs_diff_max"] for m in metrics) <= 1e-4
    assert metrics[1]["compile/count"] == metrics[2]["compile/count"]
    for steps in (2, 3):
        parts = train(parse_config(replaying(experts, tmp_path / "parts", steps=steps) | {"evaluation": held_out}))
    assert parts["params_digest"] == whole["params_digest"]


@pytest.mark.several_hosts
@pytest.mark.timeout(600)
def test_experts_reach_the_trainer_of_every_host(experts: Path, tmp_path: Path) -> None:
    """Two replicas, of one host or of two, bring the trainer the same experts."""
    one, two = tmp_path / "one", tmp_path / "two"
    completed(1, 4, experts, replaying(experts, one))
    completed(2, 2, experts, replaying(experts, two))
    for run_dir in (one, two):
        assert max(m["agreement/logprob_abs_diff_max"] for m in lines(run_dir)) <= 1e-4
    assert outcome(one) == outcome(two)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "model"),
    [("gemma2", {}), ("gemma2", {"lora": {"rank": 2}}), ("gemma2", {"train_layers": "1"}), ("gemma3_text", {})],
    ids=["all parameters", "adapters", "a layer", "gemma 3"],
)
def test_engines_and_trainer_agree_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, model: dict[str, Any]
) -> None:
    """Gemma, with rows longer than its window and padded on the left.

    The trainer is sharded in both directions, and the sampler repeats key-value heads.
    """
    monkeypatch.chdir(write_files(tmp_path / "files", kv_heads=2, model_type=family))
    meshes = {"trainer": {"fsdp": 2, "tp": 2}, "sampler": {"tensor": 4}, "probe_every": 1}
    model = {"path": str(tmp_path / "files/model"), "remat": "decoder", **model}
    train(parse_config(settings(tmp_path / "run", model=model, meshes=meshes)))
    steps = lines(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2]
    assert max(step["agreement/logprob_abs_diff_max"] for step in steps) <= 1e-4
    assert max(step["agreement/probe"] for step in steps) <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_taught_gemma_3_learns_the_demos_task(tmp_path: Path) -> None:
    train(load_config(DEMO, ["model.path=builtin:gemma_addition", f"run.dir={tmp_path}"]))
    steps = lines(tmp_path)
    means = [step["rewards/mean"] for step in steps]
    assert np.mean(means[-5:]) - np.mean(means[:5]) >= 0.3
    assert max(step["agreement/logprob_abs_diff_max"] for step in steps) <= 1e-4
