"""Whole runs with adapters: what they leave, continuing, and starting another run from them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.several.runs import settings, write_files
from tpu_grpo.cli.dry_run import check
from tpu_grpo.cli.evaluate import evaluate_checkpoint
from tpu_grpo.config import EvaluationSection, RunConfig, parse_config
from tpu_grpo.hosts import Hosts, Watch
from tpu_grpo.observe.evaluation import record_of
from tpu_grpo.records.errors import ConfigError
from tpu_grpo.run.fingerprints import fingerprints
from tpu_grpo.run.pipeline import train

LORA = {"rank": 2, "layers": "1"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def in_the_directory_of_the_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def config(run_dir: Path, *, steps: int = 2, resume: str = "auto", **model: Any) -> RunConfig:
    run = {"dir": str(run_dir), "max_steps": steps, "seed": 5}
    meshes = {"sampler": {"tensor": 4}, "probe_every": 1}
    checkpoint = {"every": 1, "resume": resume}
    tree = settings(run_dir, run=run, meshes=meshes, checkpoint=checkpoint)
    return parse_config(tree | {"model": tree["model"] | model})


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


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


@pytest.mark.slow
def test_a_run_of_some_layers_moves_the_others_once(tmp_path: Path) -> None:
    train(config(tmp_path / "run", train_layers="1"))
    moved = [m["weights/bytes_moved"] for m in lines(tmp_path / "run")]
    train(config(tmp_path / "all"))
    assert max(moved) < min(m["weights/bytes_moved"] for m in lines(tmp_path / "all"))
    assert not (tmp_path / "run/adapters").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"lora": LORA}, {"train_layers": "1"}], ids=["adapters", "layers"])
def test_a_checkpoint_of_what_is_trained_gives_the_numbers_that_the_run_found(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    evaluation = {"path": "held.jsonl", "prompts": 6, "samples": 4}
    given = config(tmp_path, **model).model_copy(update={"evaluation": EvaluationSection(**evaluation)})
    train(given)
    _, found = evaluate_checkpoint(given, "latest", Hosts(), Watch(Hosts()))
    last = (tmp_path / "evaluation.jsonl").read_text().splitlines()[-1]
    assert record_of(found) == json.loads(last)


def test_what_the_model_lacks_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"train_layers": "1-2"}, r"model.train_layers must name layers .* which has 2 \(0-1\), got 1-2"),
        ({"lora": {"rank": 2, "layers": "0,9"}}, r"model.lora.layers must name layers .* which has 2 \(0-1\), got 0,9"),
        ({"lora": {"rank": 2, "targets": "query"}}, r"model.lora.targets must be found in .*attn.q_proj"),
    ]
    for model, expected in cases:
        with pytest.raises(ConfigError, match=expected):
            check(config(tmp_path / "run", **model))
