"""The demo learns from a reward of single tokens alone: the one of docs/rewards.md."""

import json
import re
from pathlib import Path

import pytest

from tests.test_pipeline import lines
from tpu_grpo.config import load_config
from tpu_grpo.pipeline import train

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_demo_learns_from_its_digits(tmp_path: Path) -> None:
    [source] = re.findall(
        r"^```python\n(from[^`]*?@per_token.*?)^```", (REPOSITORY / "docs/rewards.md").read_text(), re.M | re.S
    )
    (tmp_path / "digits.py").write_text(source)
    rewards = f"[{{name: '{tmp_path}/digits.py:right_digits'}}, {{name: exact_answer, weight: 0}}]"
    overrides = [f"run.dir={tmp_path}/run", "run.max_steps=30", "evaluation.prompts=8", f"rewards={rewards}"]
    train(load_config(REPOSITORY / "configs" / "demo_cpu.yaml", overrides))
    steps = lines(tmp_path / "run")
    for step in steps:
        assert step["rewards/mean"] == 0.0
        assert step["update/loss"] != 0.0
    first, last = (
        [sum(step[f"rewards/{name}/mean"] for step in part) / 3 for name in ("right_digits", "exact_answer")]
        for part in (steps[:3], steps[-3:])
    )
    assert last[0] > first[0] + 0.3  # of 1.5, for two digits and the stop token
    assert last[1] > first[1] + 0.2
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert len(sample["per_token"]) == sample["tokens"]
        assert set(sample["per_token"]) <= {0.5, -0.5}
        assert sum(sample["per_token"]) == sample["rewards"]["right_digits"]
        assert sample["advantage"] == sample["reward"] == 0.0
