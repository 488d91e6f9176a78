"""The wheel and the source package: what they hold, and that they work in a fresh environment in another folder."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
UV = os.environ.get("UV") or shutil.which("uv") or ""
"""Where uv is; ``uv run`` says it."""

pytestmark = pytest.mark.skipif(
    not UV or subprocess.run([UV, "--version"], cwd=REPOSITORY, capture_output=True).returncode != 0,
    reason="uv is not installed",
)


def typed(*words: str | Path, cwd: Path) -> str:
    """What a command prints, outside of this checkout and its environment."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "JAX_PLATFORMS", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both packages, built of a copy of what git would have; the wheel is built of the source package."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("built")
    listed = typed("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=REPOSITORY)
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, copy / name)
    typed(UV, "build", "--quiet", "--out-dir", out, cwd=copy)
    return {"wheel": next(out.glob("*.whl")), "source": next(out.glob("*.tar.gz"))}


@pytest.mark.full
def test_the_wheel_holds_the_package_and_its_configs(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
        about = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    ours = [*(REPOSITORY / "tpu_grpo").rglob("*"), *(REPOSITORY / "configs").rglob("*")]
    files = {path.relative_to(REPOSITORY).as_posix() for path in ours if path.is_file() and path.suffix != ".pyc"}
    assert inside == {f"tpu_grpo/{name}" if name.startswith("configs/") else name for name in files}
    assert "Classifier: Typing :: Typed" in about
    assert "Project-URL: " in about


@pytest.mark.full
def test_the_source_package_holds_what_a_clone_has(built: dict[str, Path]) -> None:
    with tarfile.open(built["source"]) as archive:
        names = {name.partition("/")[2].partition("/")[0] for name in archive.getnames()}
    assert {"tpu_grpo", "configs", "scripts", "examples", "docs", "tests", "README.md", "LICENSE"} <= names
    assert not names & {".venv", ".git", "runs", "dist", "uv.lock"}


@pytest.mark.slow  # it installs 2.2 GB twice
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_a_fresh_environment_runs_the_demo(built: dict[str, Path], kind: str, tmp_path: Path) -> None:
    programs, folder = tmp_path / "venv" / "bin", tmp_path / "elsewhere"
    folder.mkdir()
    typed(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv", cwd=folder)
    typed(UV, "pip", "install", "--quiet", "--python", programs / "python", built[kind], cwd=folder)
    typed(UV, "pip", "check", "--quiet", "--python", programs / "python", cwd=folder)
    assert "train by GRPO" in typed(programs / "tpu-grpo", "--help", cwd=folder)
    assert "section.key=value" in typed(programs / "tpu-grpo", "run", "--help", cwd=folder)
    assert "done: 2 steps" in typed(programs / "tpu-grpo", "run", "run.max_steps=2", cwd=folder)
    summary = json.loads((folder / "runs" / "demo_cpu" / "summary.json").read_text())
    assert summary["step"] == 2
    assert summary["agreement/logprob_abs_diff_max"] < 1e-4
