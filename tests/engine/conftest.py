"""What tests of whole engines share."""

from pathlib import Path

import pytest
from flax import nnx

from tests.engine.building import policy


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> nnx.Module:
    """The trainer's model of the module's checkpoint."""
    return policy(checkpoint)
