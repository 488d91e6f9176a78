"""The commands of docs/serving.md, with libraries from PyPI in virtual environments of their own: policies learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SERVER = re.compile(r"/run-api |\.py serve ")


def commands(section: str) -> list[str]:
    """Return the lines of a section's blocks of commands."""
    text = (REPOSITORY / "docs" / "serving.md").read_text()
    [body] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", body, re.M | re.S)
    return [line for language, block in blocks if not language for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("section", ["An agent plays the episodes", "verifiers", "Atropos"])
def test_the_commands_of_the_page_train_a_policy(section: str, tmp_path: Path) -> None:
    for name in ("configs", "examples", "scripts", ".python-version"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    lines = [f"{line} &" if SERVER.search(line) else line for line in commands(section)]
    script = "\n".join(["set -e", "trap 'kill $(jobs -p) || true' EXIT", *lines])
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "UV_NO_CONFIG": "1"}
    done = subprocess.run(
        ["bash", "-c", script.replace("uv run ", "python ")],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "errors").open("w"),
        text=True,
        timeout=3500,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{(tmp_path / 'errors').read_text()[-4000:]}"
    found = re.findall(r"mean of the first five steps ([\d.]+), of the last five ([\d.]+)", done.stdout)
    runs = [line for line in lines if "scripts/run.py" in line]
    learnt = [float(last) - float(first) for first, last in found]
    assert len(learnt) == len(runs)
    assert all(more >= 0.2 for more, line in zip(learnt, runs, strict=True) if "run.max_steps=1" not in line)
