"""The guide, followed line by line up to the training, which the demo's own tests cover."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GUIDE = (REPOSITORY / "docs" / "write_an_algorithm.md").read_text()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The files that the guide has the reader write."""
    written = re.findall(r"^`(my_[\w.]+)`[^\n]*\n\n```\w+\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in written] == ["my_algorithm.py", "my_numbers.py", "my_algorithm.yaml"]
    for name, text in written:
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.full
def test_the_commands_of_the_guide(files: Path) -> None:
    commands = re.findall(r"^```sh\nuv run (.*?)\n```", GUIDE, re.MULTILINE)
    assert commands[-1] == "scripts/run.py my_algorithm.yaml"  # the training
    said = []
    for command in commands[:-1]:
        script, *arguments = command.split()
        path = files / script if script.startswith("my_") else REPOSITORY / script
        program = [sys.executable, str(path), *arguments]
        done = subprocess.run(program, cwd=files, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    shown = re.search(r"It prints\n\n```\n(.*?)```", GUIDE, re.DOTALL)
    assert shown is not None
    assert said[0] == shown[1]
    assert re.search(r"algorithm +my_algorithm.py:Cispo, token-mean", said[1])
    [line] = re.findall(r"^`(mean_it \[.*)`\.", GUIDE, re.MULTILINE)
    assert f"objective  {line}\n" in said[1]


def test_the_example_of_the_page_for_newcomers_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "what_is_grpo.md").read_text()
    code, printed = re.findall(r"^```(?:python)?\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "what_is_grpo.md", "exec"), {})
    assert capsys.readouterr().out == printed
