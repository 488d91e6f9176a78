"""The guide, followed line by line up to the training, which the demo's own tests cover."""

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_grpo.algorithms import open_algorithm
from tpu_grpo.config import AlgorithmSection

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


def test_the_numbers_of_the_page_for_newcomers() -> None:
    page = (REPOSITORY / "docs" / "what_is_grpo.md").read_text()
    algorithm = open_algorithm(AlgorithmSection(name="grpo", group_size=8))
    groups = re.findall(r"^\| [A-D].*? \| ([01 ]{15}) \|.*\| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert len(groups) == 4
    for rewards, *told in groups:
        [advantages] = algorithm.advantages(np.array([[float(reward) for reward in rewards.split()]]))
        assert [round(float(advantages[at]), 3) for at in (0, -1)] == [_last_number(text) for text in told]
    tokens = re.findall(r"^\| (0\.\d\d), (0\.\d\d) \| [\d.]+ \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert len(tokens) == 5
    for then, now, advantage, loss, said in tokens:
        given = (jnp.log(jnp.float32([[now]])), jnp.log(jnp.float32([[then]])), jnp.float32([[advantage]]))
        found = algorithm.token_losses(*given)
        assert float(found.loss_BT[0, 0]) == pytest.approx(_last_number(loss), abs=1.15e-3)  # rounded, as its advantage
        assert bool(found.clipped_BT[0, 0]) == said.startswith("clipped")


def _last_number(text: str) -> float:
    return float(text.split()[-1]) if text else 0.0
