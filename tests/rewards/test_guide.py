"""The guide is followed line by line; its training is the demo, which whole-run tests cover."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GUIDE = (REPOSITORY / "docs" / "write_a_reward.md").read_text()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The files that the guide has the reader write."""
    written = re.findall(r"^`(my_[\w.]+)`[^\n]*\n\n```\w+\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in written] == ["my_reward.py", "my_tries.jsonl", "my_reward.yaml"]
    for name, text in written:
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.full
def test_the_commands_of_the_guide(files: Path):
    commands = re.findall(r"^```sh\npython scripts/(.*?)\n```", GUIDE, re.MULTILINE)
    assert commands[-1] == "run.py my_reward.yaml"  # the training
    said = []
    for command in commands[:-1]:
        script, *arguments = command.split()
        program = [sys.executable, str(REPOSITORY / "scripts" / script), *arguments]
        done = subprocess.run(program, cwd=files, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    rows = [re.split(" *[┃│] *", line)[1:4] for line in said[0].splitlines() if re.match("│ [0-9]", line)]
    assert rows == [["0", "1", "1"], ["1", "0.1", "0"], ["2", "0", "0"]]
    assert re.search(r"rewards +right_sum, exact_answer", said[1])
