"""The guide is followed line by line."""

import re
from pathlib import Path

import pytest

from tests.test_printed_commands import followed


@pytest.mark.full
def test_the_commands_of_the_guide(tmp_path: Path):
    table, dry_run = followed("docs/write_a_reward.md", tmp_path)
    rows = [re.split(" *[┃│] *", line)[1:4] for line in table.splitlines() if re.match("│ [0-9]", line)]
    assert rows == [["0", "1", "1"], ["1", "0.1", "0"], ["2", "0", "0"]]
    assert re.search(r"rewards +right_sum, exact_answer", dry_run)
