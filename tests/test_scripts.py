"""A script of a clone, started by a Python that lacks the package's dependencies."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, the package and the configs of this checkout, without an environment."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("scripts", "tpu_grpo", "configs"):
        (folder / name).symlink_to(REPOSITORY / name) if name != "scripts" else (folder / name).mkdir()
    for script in (REPOSITORY / "scripts").glob("*.py"):
        (folder / "scripts" / script.name).write_text(script.read_text())
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python 3.12 with nothing installed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def typed(python: Path, clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([python, *words], cwd=clone, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", sorted(path.name for path in (REPOSITORY / "scripts").glob("[!b]*.py")))
def test_without_an_environment_one_line_says_what_to_type(clone: Path, bare: Path, script: str) -> None:
    done = typed(bare, clone, f"scripts/{script}", "run.seed=1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"{bare} lacks pydantic, jax, tunix, sgl_jax; type: pip install uv && uv run scripts/{script} run.seed=1\n"
    )


def test_the_environment_beside_the_scripts_is_used(clone: Path, bare: Path) -> None:
    (clone / ".venv").symlink_to(Path(sys.prefix))
    done = typed(bare, clone, "scripts/run.py", "--print-config", "run.seed=7")
    assert (done.returncode, "seed: 7" in done.stdout) == (0, True), done.stderr
