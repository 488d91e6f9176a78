"""What the tests of models share."""

import numpy as np
import pytest


@pytest.fixture
def tokens_BT() -> np.ndarray:
    """2 rows of 48 tokens of a vocabulary of 300."""
    return np.random.default_rng(3).integers(0, 300, (2, 48)).astype(np.int32)
