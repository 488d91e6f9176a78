"""Shapes in annotations are checked in the tests, and only shapes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from jaxtyping import Array, Float, TypeCheckError

from tests.shapes import names_array
from tpu_grpo.learner.loss import agreement_sums


def test_a_wrong_shape_is_caught() -> None:
    logps_BT, mask_BT = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    with pytest.raises(TypeCheckError, match=r"parameters of tpu_grpo.learner.loss.agreement_sums"):
        agreement_sums(logps_BT[0], logps_BT, mask_BT)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Float[Array, "B T"], True),
        (tuple[Float[Array, " B"], int], True),
        (Mapping[str, Float[np.ndarray, " B"]], True),
        (Mapping[str, int], False),
        (np.ndarray, False),
        (Any, False),
    ],
)
def test_only_what_names_a_shape_is_checked(kind: Any, expected: bool) -> None:
    assert names_array(kind) is expected
