"""The run's directory: made, kept, or moved aside, and never lost."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.config import RunConfig, load_config, parse_config
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import CheckpointError, ConfigError, DataError
from tpu_grpo.run.directory import RunDirectory


def config_for(directory: Path | str, resume: str = "auto", **run: Any) -> RunConfig:
    return parse_config({"run": {"dir": str(directory), **run}, "checkpoint": {"resume": resume}})


def begin(config: RunConfig) -> Path | None:
    """Begin a run, end it, and say where an earlier one went."""
    with RunDirectory(config, Hosts()) as directory:
        notes = directory.begin(0, {"digest": "a" * 64})
    moved = [note.removeprefix("an earlier run's files were moved to ") for note in notes if note.startswith("an earl")]
    return Path(moved[0]) if moved else None


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def leave_files(directory: Path, text: str) -> None:
    (directory / "checkpoints" / "4").mkdir(parents=True)
    (directory / "config.yaml").write_text(config_for(directory).to_yaml())
    (directory / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_directory_is_made_with_the_resolved_config(tmp_path: Path, resume: str) -> None:
    config = config_for(tmp_path / "a" / "b", resume, seed=7)
    assert begin(config) is None
    assert names(tmp_path / "a" / "b") == ["config.yaml", "data.json", "logs", "sources.json"]
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
    assert names(tmp_path / "run.v2") == ["config.yaml", "data.json", "logs", "sources.json"]


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


# --- what is not as it was --------------------------------------------------------------------------------------------

STEPS = '{"step": 1}\n'


def go_on(config: RunConfig, start: int = 4, digest: str = "a" * 64) -> list[str]:
    with RunDirectory(config, Hosts()) as directory:
        return directory.begin(start, {"digest": digest})


def changes(directory: Path) -> list[Any]:
    return [json.loads(line) for line in (directory / "changes.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_the_data_it_began_with(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    assert go_on(config, 0) == []
    assert json.loads((tmp_path / "data.json").read_text())["digest"] == "a" * 64
    assert go_on(config) == []
    (tmp_path / "history.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match=r"data\.json their digest was a{9}\.\.\., now it is b{9}.*=\[data\]"):
        go_on(config, digest="b" * 64)
    assert json.loads((tmp_path / "data.json").read_text())["digest"] == "a" * 64
    allowed = parse_config(config.model_dump() | {"checkpoint": {"allow_changes": ["data"]}})
    (note,) = go_on(allowed, digest="b" * 64)
    assert note.startswith("changed after step 4: data: digest aaaaaaaaaaaaaaaa -> digest bbbbbbbbbbbbbbbb (allowed; ")
    assert names(tmp_path)[:4] == ["changes.jsonl", "config.yaml", "data.json", "history.until_4.jsonl"]
    assert go_on(allowed, digest="b" * 64) == []
    assert go_on(config, 0, "c" * 64) == []  # no step is done
    assert json.loads((tmp_path / "data.json").read_text())["digest"] == "c" * 64


def test_a_run_of_an_older_digest_goes_on_with_the_same_prompts_only(tmp_path: Path) -> None:
    """Earlier versions kept a digest of tokens, and did not say of what it was."""
    config, texts = config_for(tmp_path), {"digest": "b" * 64, "digest_of": "texts"}
    go_on(config, 0, "a" * 64)
    with RunDirectory(config, Hosts()) as directory, pytest.raises(DataError, match=r"was a{9}\.\.\., now it is c{9}"):
        directory.begin(4, texts, lambda: "c" * 64)
    with RunDirectory(config, Hosts()) as directory:
        assert directory.begin(4, texts, lambda: "a" * 64) == []
    assert json.loads((tmp_path / "data.json").read_text()) == texts
    with RunDirectory(config, Hosts()) as directory:
        assert directory.begin(4, texts, lambda: pytest.fail("its own digest is of texts now")) == []


def test_a_harmless_change_goes_on_and_is_recorded(tmp_path: Path) -> None:
    go_on(config_for(tmp_path, max_steps=5), 0)
    (tmp_path / "metrics.jsonl").write_text(STEPS)
    longer = config_for(tmp_path, max_steps=10)
    assert go_on(longer) == ["changed after step 4: run.max_steps: 5 -> 10 (results do not depend on it)"]
    assert changes(tmp_path) == [{"step": 4, "name": "run.max_steps", "old": "5", "new": "10", "effect": "none"}]
    assert load_config(tmp_path / "config.yaml") == longer
    assert go_on(longer) == []


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints"])
def test_a_change_of_results_is_refused_unless_it_is_allowed(tmp_path: Path, left: str) -> None:
    go_on(config_for(tmp_path), 0)
    if left == "checkpoints":
        (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    else:
        (tmp_path / "metrics.jsonl").write_text(STEPS)
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as caught:
        go_on(config_for(tmp_path, seed=1))
    assert str(caught.value) == (
        f"a run must go on with the settings it began with, and {tmp_path} was begun with others:\n  run.seed: 0 -> 1\n"
        "results before and after could not be compared: give this run another run.name or run.dir, start over with "
        "checkpoint.resume=never, or go on all the same with checkpoint.allow_changes='[run.seed]'"
    )
    assert (tmp_path / "config.yaml").read_bytes() == before
    allowed = parse_config({"run": {"dir": str(tmp_path), "seed": 1}, "checkpoint": {"allow_changes": ["run"]}})
    assert len(go_on(allowed)) == 2  # allow_changes itself is the other
    assert [(change["name"], change["effect"]) for change in changes(tmp_path)] == [
        ("run.seed", "results"),
        ("checkpoint.allow_changes", "none"),
    ]


def test_without_a_step_there_is_nothing_to_compare(tmp_path: Path) -> None:
    go_on(config_for(tmp_path), 0)
    assert go_on(config_for(tmp_path, seed=1), 0) == []
    assert load_config(tmp_path / "config.yaml").run.seed == 1


def test_a_continued_run_is_as_it_was_when_its_start_fails(tmp_path: Path) -> None:
    go_on(config_for(tmp_path, max_steps=5), 0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(DataError, match="bad"), RunDirectory(config_for(tmp_path, max_steps=10), Hosts()):
        raise DataError("bad")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_run_that_requires_a_checkpoint_ends_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"needs a checkpoint in {tmp_path}/run/checkpoints, found none"):
        go_on(config_for(tmp_path / "run", "require"))
    assert names(tmp_path) == []


# --- one run at a time, and only when nothing is left to fail ---------------------------------------------------------


@pytest.mark.parametrize("resume", ["auto", "never", "require"])
def test_a_directory_in_use_is_refused_untouched(tmp_path: Path, resume: str) -> None:
    run = tmp_path / "run"
    with RunDirectory(config_for(run, seed=1), Hosts()) as directory:
        directory.begin(0, {"digest": "a" * 64})
        before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [run, *run.iterdir()]}
        with pytest.raises(ConfigError, match=rf"{run} is in use by process {os.getpid()} on host .* since 20"):
            begin(config_for(run, resume, seed=2))
        assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [run, *run.iterdir()]} == before
        assert names(tmp_path) == ["run"]
    assert names(run) == ["config.yaml", "data.json", "logs", "sources.json"]


def test_a_moved_directory_stays_in_use(tmp_path: Path) -> None:
    leave_files(tmp_path / "run", "earlier")
    with RunDirectory(config_for(tmp_path / "run", "never"), Hosts()) as directory:
        with pytest.raises(ConfigError, match="is in use by"):
            begin(config_for(tmp_path / "run"))
        directory.begin(0, {"digest": "a" * 64})
        with pytest.raises(ConfigError, match="is in use by"):
            begin(config_for(tmp_path / "run"))
        assert names(tmp_path / "run.1") == ["checkpoints", "config.yaml", "metrics.jsonl"]
    assert names(tmp_path / "run") == ["config.yaml", "data.json", "logs", "sources.json"]


def test_a_start_that_fails_leaves_an_earlier_run_in_place(tmp_path: Path) -> None:
    leave_files(tmp_path / "run", "earlier")
    with (
        pytest.raises(DataError, match="no such file"),
        RunDirectory(config_for(tmp_path / "run", "never"), Hosts()),
    ):
        raise DataError("no such file")
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["checkpoints", "config.yaml", "metrics.jsonl"]


def test_what_is_left_by_a_start_that_ends_after_the_move_is_a_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_files(tmp_path / "run", "earlier")
    never = config_for(tmp_path / "run", "never")
    with (
        monkeypatch.context() as patched,
        pytest.raises(KeyboardInterrupt),
        RunDirectory(never, Hosts()) as directory,
    ):
        patched.setattr("tpu_grpo.run.directory.check_shared", lambda *_, **__: _interrupt())
        directory.begin(0, {"digest": "a" * 64})
    assert names(tmp_path / "run") == ["config.yaml"]
    assert begin(never) == tmp_path / "run.2"


def _interrupt() -> None:
    raise KeyboardInterrupt


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
    (tmp_path / "run" / "config.yaml").write_text(config_for(tmp_path / "run").to_yaml())
    with RunDirectory(config_for(tmp_path / "run"), Hosts()) as directory:
        assert directory.saved_steps == (9, 10)
