"""The demo learns from a per-token reward alone: the one of docs/rewards.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.several.runs import lines

REPOSITORY = Path(__file__).parents[1]
DROPPED = ("JAX_PLATFORMS", "XLA_FLAGS")
"""What the tests set for their own process."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_from_its_digits(tmp_path: Path) -> None:
    guide = (REPOSITORY / "docs" / "rewards.md").read_text()
    [source] = re.findall(r"^```python\n(from[^`]*?@per_token.*?)^```", guide, re.MULTILINE | re.DOTALL)
    (tmp_path / "digits.py").write_text(source)
    rewards = "[{name: 'digits.py:right_digits'}, {name: exact_answer, weight: 0}]"
    words = ["run.dir=run", "run.max_steps=25", "evaluation.prompts=8", "logging.samples_every=5", f"rewards={rewards}"]
    command = [sys.executable, str(REPOSITORY / "scripts" / "run.py"), *words]
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
    environment = kept | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
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
    samples = lines(tmp_path / "run", "samples.jsonl")
    assert len(samples) == 5 * 256
    for sample in samples:
        assert len(sample["per_token"]) == sample["tokens"]
        assert set(sample["per_token"]) <= {0.5, -0.5}
        assert sum(sample["per_token"]) == sample["rewards"]["right_digits"]
        assert sample["advantage"] == sample["reward"] == 0.0
