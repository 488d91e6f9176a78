"""The run's directory: made, kept, or moved aside, and never lost."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.config import RunConfig, load_config, parse_config
from tpu_grpo.errors import ConfigError, DataError
from tpu_grpo.hosts import Hosts
from tpu_grpo.run.directory import RunDirectory, continue_data


def config_for(directory: Path | str, resume: str = "auto", **run: Any) -> RunConfig:
    return parse_config({"run": {"dir": str(directory), **run}, "checkpoint": {"resume": resume}})


def begin(config: RunConfig) -> Path | None:
    """Begin a run, end it, and say where an earlier one went."""
    with RunDirectory(config, Hosts()) as directory:
        moved = directory.begin()
    return None if moved is None else Path(moved)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def leave_files(directory: Path, text: str) -> None:
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "config.yaml").write_text("")
    (directory / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize("resume", ["auto", "never", "require"])
def test_a_new_directory_is_made_with_the_resolved_config(tmp_path: Path, resume: str) -> None:
    config = config_for(tmp_path / "a" / "b", resume, seed=7)
    assert begin(config) is None
    assert names(tmp_path / "a" / "b") == ["config.yaml", "logs"]
    assert load_config(tmp_path / "a" / "b" / "config.yaml") == config


def test_the_default_directory_is_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin(parse_config({"run": {"name": "x"}}))
    assert (tmp_path / "runs" / "x" / "config.yaml").is_file()


@pytest.mark.parametrize("resume", ["auto", "require"])
def test_a_continued_run_keeps_its_files_and_gets_the_new_config(tmp_path: Path, resume: str) -> None:
    leave_files(tmp_path / "run", "earlier")
    begin(config_for(tmp_path / "run", max_steps=5))
    longer = config_for(tmp_path / "run", resume, max_steps=10)
    assert begin(longer) is None
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "earlier"
    assert load_config(tmp_path / "run" / "config.yaml") == longer
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_earlier_runs_are_moved_to_the_first_free_number(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run.v2", "never")
    for number in (1, 2, 3):
        leave_files(tmp_path / "run.v2", f"earlier {number}") if number == 1 else (
            (tmp_path / "run.v2" / "metrics.jsonl").write_text(f"earlier {number}")
        )
        assert begin(config) == tmp_path / f"run.v2.{number}"
        assert (tmp_path / f"run.v2.{number}" / "metrics.jsonl").read_text() == f"earlier {number}"
    assert (tmp_path / "run.v2.1" / "checkpoints").is_dir()
    assert names(tmp_path / "run.v2") == ["config.yaml", "logs"]


def test_an_unrelated_file_of_that_number_is_stepped_over(tmp_path: Path) -> None:
    leave_files(tmp_path / "run", "earlier")
    (tmp_path / "run.1").write_text("mine")
    assert begin(config_for(tmp_path / "run", "never")) == tmp_path / "run.2"
    assert (tmp_path / "run.1").read_text() == "mine"


def test_an_empty_directory_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert begin(config_for(tmp_path / "run", "never")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_linked_directory_is_moved_without_its_target(tmp_path: Path) -> None:
    leave_files(tmp_path / "disk", "earlier")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert begin(config_for(tmp_path / "run", "never")) == tmp_path / "run.1"
    assert (tmp_path / "disk" / "metrics.jsonl").read_text() == "earlier"
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == "earlier"
    assert not (tmp_path / "run").is_symlink()


@pytest.mark.parametrize("name", [".", "..", "inside/.."])
def test_the_working_directory_is_not_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "work" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(ConfigError) as caught:
        begin(config_for(name, "never"))
    assert str(caught.value) == (
        "run.dir must not hold the working directory with checkpoint.resume=never, which moves earlier files aside, "
        f"got {name}; name a directory of the run's own"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError) as caught:
        begin(config_for(tmp_path / "run"))
    start = f"run.dir must be a directory this process can write, got {tmp_path / 'run'}: [Errno 17] File exists"
    assert str(caught.value).startswith(start)
    assert isinstance(caught.value.__cause__, FileExistsError)
    assert (tmp_path / "run").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o555)
    with pytest.raises(
        ConfigError, match=r"^run\.dir must be a directory this process can write, got .*Permission denied"
    ):
        begin(config_for(tmp_path / "run"))


def test_a_directory_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^run\.dir must be .*Not a directory"):
        begin(config_for(tmp_path / "file" / "run", "never"))


def test_files_that_are_no_runs_are_never_moved(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"files that are no run's \(no config.yaml among them\), got .*run,"):
        begin(config_for(tmp_path / "run", "never"))
    assert (tmp_path / "run" / "thesis.tex").read_text() == "mine"


# --- the data of a run -----------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_data_it_began_with(tmp_path: Path) -> None:
    continue_data(tmp_path, {"digest": "a" * 64, "sources": []}, 0, Hosts())
    assert json.loads((tmp_path / "data.json").read_text())["digest"] == "a" * 64
    continue_data(tmp_path, {"digest": "a" * 64}, 5, Hosts())
    with pytest.raises(DataError, match=r"data\.json their digest was a{9}\.\.\., now it is b{9}.* after step 5"):
        continue_data(tmp_path, {"digest": "b" * 64}, 5, Hosts())
    (tmp_path / "data.json").unlink()
    continue_data(tmp_path, {"digest": "b" * 64}, 5, Hosts())
    continue_data(tmp_path, {"digest": "c" * 64}, 0, Hosts())  # a run that starts anew
    assert json.loads((tmp_path / "data.json").read_text())["digest"] == "c" * 64


# --- one run at a time, and only when nothing is left to fail ---------------------------------------------------------


@pytest.mark.parametrize("resume", ["auto", "never", "require"])
def test_a_directory_in_use_is_refused_untouched(tmp_path: Path, resume: str) -> None:
    run = tmp_path / "run"
    with RunDirectory(config_for(run, seed=1), Hosts()) as directory:
        directory.begin()
        before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [run, *run.iterdir()]}
        with pytest.raises(ConfigError, match=rf"{run} is in use by process {os.getpid()} on host .* since 20"):
            begin(config_for(run, resume, seed=2))
        assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [run, *run.iterdir()]} == before
        assert names(tmp_path) == ["run"]
    assert names(run) == ["config.yaml", "logs"]


def test_a_moved_directory_stays_in_use(tmp_path: Path) -> None:
    leave_files(tmp_path / "run", "earlier")
    with RunDirectory(config_for(tmp_path / "run", "never"), Hosts()) as directory:
        with pytest.raises(ConfigError, match="is in use by"):
            begin(config_for(tmp_path / "run"))
        directory.begin()
        with pytest.raises(ConfigError, match="is in use by"):
            begin(config_for(tmp_path / "run"))
        assert names(tmp_path / "run.1") == ["checkpoints", "config.yaml", "metrics.jsonl"]
    assert names(tmp_path / "run") == ["config.yaml", "logs"]


def test_a_start_that_fails_leaves_an_earlier_run_in_place(tmp_path: Path) -> None:
    leave_files(tmp_path / "run", "earlier")
    with (
        pytest.raises(DataError, match="no such file"),
        RunDirectory(config_for(tmp_path / "run", "never"), Hosts()),
    ):
        raise DataError("no such file")
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["checkpoints", "config.yaml", "metrics.jsonl"]


def test_a_refused_start_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("another host does not see it")

    monkeypatch.setattr("tpu_grpo.run.directory.check_shared", refuse)
    with pytest.raises(ConfigError):
        begin(config_for(tmp_path / "run"))
    assert names(tmp_path) == []


def test_the_steps_to_go_on_from_are_those_that_were_saved(tmp_path: Path) -> None:
    for name in ("10", "9", "11.orbax-checkpoint-tmp", "descriptor"):
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("")
    with RunDirectory(config_for(tmp_path / "run"), Hosts()) as directory:
        assert directory.saved_steps == (9, 10)
