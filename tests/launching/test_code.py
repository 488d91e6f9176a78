"""What workers are set up with."""

from pathlib import Path

import pytest

from tests.launching.conftest import git
from tests.launching.driving import SMALL, launch
from tests.launching.stand_in import StandIn
from tpu_grpo.launching.launcher import revision


def test_setup_brings_the_work_tree_as_it_is_and_keeps_what_runs_left(
    ready: StandIn, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ready.home(1) / ".tpu_grpo/code"
    (code / "runs").mkdir()
    (code / "runs" / "result").write_text("precious")
    (checkout / "runs").mkdir()
    (checkout / "runs" / "not this").write_text("")
    (checkout / "scripts" / "program.py").rename(checkout / "scripts" / "it's new\n.py")
    status, _, err = launch(capsys, "setup", "--code", str(checkout))
    assert status == 0
    assert " and 2 changed files, " in err  # one is gone, one is new
    assert sorted(path.name for path in (code / "scripts").iterdir()) == ["it's new\n.py"]
    assert [path.name for path in (code / "runs").iterdir()] == ["result"]
    assert "(code " in launch(capsys, "status")[1]
    assert " and 2 changed files)" in launch(capsys, "status")[1]


def test_the_setup_script_runs_in_the_checkout_of_every_worker(
    ready: StandIn, checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mount it.sh"
    script.write_text('pwd > "$HOME/mounted"\n')
    words = ("setup", "--code", str(checkout), "--setup-script", str(script))
    assert launch(capsys, *words)[0] == 0
    for worker in (0, 1):
        assert (ready.home(worker) / "mounted").read_text().strip() == str(ready.home(worker) / ".tpu_grpo/code")
    script.write_text("echo no such bucket\nexit 3\n")
    code, _, err = launch(capsys, *words)
    assert code == 1
    assert "[1] no such bucket\n" in err
    assert "[1] worker: the setup script failed" in err
    assert "failed (worker, exit code 1)" in err


def test_an_environment_that_cannot_be_installed_says_so(
    ready: StandIn, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ready.home(1) / "uv_fails").write_text("")
    code, _, err = launch(capsys, "setup", "--code", str(checkout))
    assert code == 1
    assert "##### Command execution on worker 1 failed with exit status 1" in err
    assert "[1] error: No solution found when resolving dependencies" in err
    assert "[1] worker: uv could not install the environment" in err


def test_the_work_tree_is_named_with_its_changes(checkout: Path, tmp_path: Path) -> None:
    clean = revision(checkout)
    assert " " not in clean
    (checkout / "new").write_text("")
    assert revision(checkout) == f"{clean} and 1 changed file"
    git(checkout, "add", "-A")
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "two")
    assert revision(checkout) not in (clean, f"{clean} and 1 changed file")


def test_further_packages_are_installed_after_the_pinned_ones(
    ready: StandIn, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--with", "gcsfs==2026.10.1", "--with", "my reward[x] >= 1")
    assert launch(capsys, "setup", "--code", str(checkout), *words)[0] == 0
    assert (ready.home(1) / "uv_calls").read_text().splitlines() == [
        "sync --no-dev",
        "sync --no-dev",
        "pip install --python .venv/bin/python gcsfs==2026.10.1 my reward[x] >= 1",
    ]


def test_a_run_before_setup_is_refused(ready: StandIn, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ready.home(1) / ".tpu_grpo/code/.venv/bin/python").unlink()
    code, _, err = launch(capsys, "run", *SMALL, str(config))
    assert code == 1
    assert "[1] worker: no code and environment here; run setup first" in err
