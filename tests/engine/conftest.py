"""What tests of whole engines share."""

from pathlib import Path

import pytest
from flax import nnx

from tests.engine.building import policy
from tests.models.random_checkpoint import write_random_qwen3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer with two key-value heads, which no test changes."""
    return write_random_qwen3(tmp_path_factory.mktemp("engine") / "model", layers=1)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> nnx.Module:
    """The trainer's model of the module's checkpoint."""
    return policy(checkpoint)
