"""The rows of a forward and backward pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import nnx

from tests.learner.toy import make_config
from tpu_grpo.config import RunConfig
from tpu_grpo.learner.building import row_shape

SMALL, LARGE = (1024, 4096), (1025, 4096)
"""A matrix of 4 x 2**20 parameters, and a larger one."""


def config_of(directory: Path, algorithm: dict[str, Any]) -> RunConfig:
    """64 rows of 96 tokens: an eighth are 8 rows."""
    tree = {"data": {"prompts_per_step": 8, "max_prompt_tokens": 32}, "rollout": {"max_new_tokens": 64}}
    return make_config(directory, tree | {"algorithm": {"group_size": 8, **algorithm}})


@pytest.mark.parametrize(
    ("matrix", "platform", "devices", "algorithm", "rows"),
    [
        (SMALL, "cpu", 1, {}, 2),
        (SMALL, "cpu", 2, {}, 4),
        (SMALL, "cpu", 1, {"row_tokens": 384}, 1),
        (SMALL, "cpu", 1, {"micro_batch_prompts": 1}, 8),
        (LARGE, "cpu", 1, {}, 8),
        (SMALL, "tpu", 1, {}, 8),
    ],
)
def test_rows_of_a_pass(
    tmp_path: Path, matrix: tuple[int, int], platform: str, devices: int, algorithm: dict[str, Any], rows: int
) -> None:
    """2 x 96 = 192 tokens a device for a small model on CPUs; a row of 384 cannot be less than a row."""
    model = nnx.eval_shape(lambda: nnx.Linear(*matrix, use_bias=False, rngs=nnx.Rngs(0)))
    mesh: Any = SimpleNamespace(
        shape={"fsdp": devices, "tp": 1}, devices=np.array([[SimpleNamespace(platform=platform)]] * devices)
    )
    assert row_shape(config_of(tmp_path, algorithm), model, mesh).micro_batch == rows
