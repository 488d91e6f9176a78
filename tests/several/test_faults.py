"""A few faults of `tests.several.faults`; its command does two hundred."""

import pytest

from tests.several.faults import suffer


@pytest.mark.full
def test_faults_drawn_at_random_are_contained() -> None:
    told: list[str] = []
    came = suffer(16, 3, told.append, rigs=("reward, skip", "environment"))
    assert came.total() >= 6, told
