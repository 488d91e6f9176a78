"""A run whose tokens are drawn under filters: engine and trainer agree on log-probabilities among what these keep."""

from pathlib import Path

import numpy as np
import pytest

from tpu_grpo.config import load_config
from tpu_grpo.observe.json_lines import read_records
from tpu_grpo.run.pipeline import train

DEMO = Path(__file__).parents[1] / "configs" / "demo_cpu.yaml"


@pytest.mark.slow  # the demo's engine and learner are compiled
@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.9, "min_p": 0.02}, {"min_p": 0.2}], ids=str)
def test_engine_and_trainer_agree(tmp_path: Path, filters: dict[str, float]) -> None:
    words = [f"rollout.{name}={value}" for name, value in filters.items()]
    more = ["algorithm.filtered_ratio=true", "run.max_steps=3", "evaluation.prompts=8", f"run.dir={tmp_path}"]
    train(load_config(DEMO, [*words, *more]))
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert len(records) == 3
    assert max(record["agreement/logprob_abs_diff_max"] for record in records) <= 1e-4
    assert max(record["agreement/logprob_abs_diff_mean"] for record in records) <= 1e-5
    assert np.array([record["update/entropy"] for record in records]).min() > 0.0
