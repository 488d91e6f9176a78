"""Whole runs of Gemma 2, whose rows are longer than its window and padded on the left."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.several.runs import settings, write_files
from tpu_grpo.config import parse_config
from tpu_grpo.run.pipeline import train


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [{}, {"lora": {"rank": 2}}, {"train_layers": "1"}], ids=["all parameters", "adapters", "a layer"]
)
def test_engines_and_trainer_agree_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    """The trainer is sharded in both directions, and the sampler repeats key-value heads."""
    monkeypatch.chdir(write_files(tmp_path / "files", kv_heads=2, model_type="gemma2"))
    meshes = {"trainer": {"fsdp": 2, "tp": 2}, "sampler": {"tensor": 4}, "probe_every": 1}
    model = {"path": "model", "remat": "decoder", **model}
    train(parse_config(settings(tmp_path / "run", model=model, meshes=meshes)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert max(line["agreement/logprob_abs_diff_max"] for line in lines) <= 1e-4
    assert max(line["agreement/probe"] for line in lines) <= 1e-5
