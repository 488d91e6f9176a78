"""The command line of scripts/report.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching.driving import imported
from tests.report.runs import leave_run
from tpu_grpo.cli.report import main
from tpu_grpo.run.lock import RunLock

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_page_is_written_into_the_run_or_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (str(leave_run(tmp_path / name, 2, name=name)) for name in ("a", "b"))
    monkeypatch.chdir(tmp_path)
    assert main([first]) == 0
    assert main([second, "--output", "b.html"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{first}/report.html", "b.html"]
    assert "<h1>a</h1>" in Path(first, "report.html").read_text()
    assert "<h1>b</h1>" in Path("b.html").read_text()
    assert not Path(second, "report.html").exists()


def test_a_run_that_goes_on_is_shown_and_left_alone(tmp_path: Path) -> None:
    leave_run(tmp_path, 2)
    lock = RunLock.take(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert main([str(tmp_path)]) == 0
    assert "The run goes on: step 2 of 10" in (tmp_path / "report.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == before | {"report.html"}
    lock.release()
    assert main([str(tmp_path)]) == 0
    assert "The run ended after step 2 of 10 without saying why" in (tmp_path / "report.html").read_text()


def test_a_page_that_cannot_be_written_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "report.html")

    run = str(leave_run(tmp_path / "run", 2))
    assert main([run, "--output", "nosuch/x.html"]) == 2
    monkeypatch.setattr("tpu_grpo.report.run_page.replace_text", full)
    assert main([run]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "ConfigError: --output must lie in a directory that is there, got nosuch/x.html; make nosuch first"
    assert second.startswith("DiskError: the disk must take report.html, got: No space left on device; free some space")


def test_jax_is_not_imported(tmp_path: Path) -> None:
    leave_run(tmp_path, 2)
    command = [sys.executable, "-X", "importtime", str(REPOSITORY / "scripts" / "report.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "numpy" in imported(done.stderr)
    heavy = {"jax", "jaxlib", "flax", "transformers", "sgl_jax", "tunix", "wandb", "matplotlib"}
    assert imported(done.stderr) & heavy == set()
