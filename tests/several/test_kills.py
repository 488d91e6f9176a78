"""A few kills of `tests.several.kills`; its command does fifty."""

from pathlib import Path

import pytest

from tests.several.kills import disturbed


@pytest.mark.several_hosts
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.slow  # test_signal.py has a kill on two hosts
def test_a_run_that_is_killed_again_and_again_ends_as_an_undisturbed_one(tmp_path: Path, hosts: int) -> None:
    assert disturbed(tmp_path, hosts, kills=3, seed=1) >= 3
