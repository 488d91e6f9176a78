"""The run's directory: looked at, made, kept, or moved aside, and never lost."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.config import RunConfig, load_config, parse_config
from tpu_grpo.hosts import Hosts
from tpu_grpo.observe.run_files import REPLACED_FILES
from tpu_grpo.records.errors import CheckpointError, ConfigError, DataError
from tpu_grpo.run.directory import RunDirectory, how_it_ended
from tpu_grpo.run.lock import RunLock

ALONE = Hosts()


def config_for(directory: Path | str, resume: str = "auto", **run: Any) -> RunConfig:
    return parse_config({"run": {"dir": str(directory), **run}, "checkpoint": {"resume": resume}})


def run_of(directory: Path, max_steps: int = 4, **sections: Any) -> RunConfig:
    return parse_config({"run": {"dir": str(directory), "max_steps": max_steps}, **sections})


def go_on(config: RunConfig, start: int = 4, digest: str = "a" * 64) -> list[str]:
    """Begin a run after this step, end it, and return what it noted, but for how it broke off and what is lost."""
    notes = every_note(config, start, digest)
    return [note for note in notes if not note.startswith("before, ") and "lacks steps" not in note]


def every_note(config: RunConfig, start: int = 0, digest: str = "a" * 64) -> list[str]:
    with RunDirectory(config, ALONE) as directory:
        return directory.begin(start, {"digest": digest})


def begin(config: RunConfig) -> Path | None:
    """Begin a run, end it, and say where an earlier one went."""
    moved = [note.partition("an earlier run's files were moved to ")[2] for note in go_on(config, 0)]
    return next((Path(place) for place in moved if place), None)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def leave(config: RunConfig, *saved: int, **summary: Any) -> None:
    """What a run leaves that has done steps; with a summary if it has come to its end."""
    directory = config.run_dir
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(config.to_yaml())
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    (directory / "sources.json").write_text("{}")
    (directory / "data.json").write_text(json.dumps({"digest": "a" * 64}))
    for step in saved:
        (directory / "checkpoints" / str(step)).mkdir(parents=True)
    if summary:
        (directory / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("logged", "start", "note"),
    [
        ((1, 2, 3, 4), 2, "steps 3 to 4 were done, have no checkpoint that can be read, and are done again"),
        ((1, 2), 0, "steps 1 to 2 were done, have no checkpoint that can be read, and are done again"),
        ((1, 2), 4, "{path} lacks steps 3 to 4, which are done"),
        ((), 1, "{path} lacks steps 1 to 1, which are done"),
        ((1, 2), 2, None),
    ],
)
def test_steps_that_are_lost_are_named(tmp_path: Path, logged: Sequence[int], start: int, note: str | None) -> None:
    """Whoever removed checkpoints or metrics, or lost them, does not find it out from charts."""
    config = run_of(tmp_path)
    leave(config, 4)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in logged))
    found = [note for note in every_note(config, start) if not note.startswith("before, ")]
    assert found == ([] if note is None else [note.format(path=path)])


def test_steps_without_metrics_and_checkpoints_are_named_too(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    leave(config)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "history.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    note = "steps 1 to 2 were done, have no checkpoint that can be read, and are done again"
    assert note in every_note(config, 0)


def leave_files(directory: Path, text: str) -> None:
    leave(config_for(directory), 4)
    (directory / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_or_empty_directory_gets_the_resolved_config(tmp_path: Path, resume: str) -> None:
    config = config_for(tmp_path / "a" / "b", resume, seed=7)
    if resume == "never":
        (tmp_path / "a" / "b").mkdir(parents=True)
    assert begin(config) is None
    assert names(tmp_path / "a" / "b") == ["config.yaml", "data.json", "logs", "sources.json"]
    assert load_config(tmp_path / "a" / "b" / "config.yaml") == config
    assert names(tmp_path) == ["a"]


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


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError) as caught:
        begin(config_for(tmp_path / "run"))
    start = f"run.dir must be a directory this process can write, got {tmp_path / 'run'}: [Errno 17] File exists"
    assert str(caught.value).startswith(start)
    assert isinstance(caught.value.__cause__, FileExistsError)
    assert (tmp_path / "run").read_text() == "a file"
    with pytest.raises(ConfigError, match=r"^run\.dir must be .*Not a directory"):
        begin(config_for(tmp_path / "run" / "below", "never"))
    if os.geteuid() != 0:  # root writes everywhere
        (tmp_path / "locked").mkdir(mode=0o555)
        with pytest.raises(ConfigError, match=r"^run\.dir must be a directory .*Permission denied"):
            begin(config_for(tmp_path / "locked"))


@pytest.mark.parametrize("name", ["checkpoints", "logs", "evaluations", "damaged_checkpoints"])
@pytest.mark.parametrize("what", ["file", "pipe", "loop"])
def test_something_else_in_the_place_of_a_directory_is_named(tmp_path: Path, name: str, what: str) -> None:
    config = run_of(tmp_path / "run")
    leave(config, 2)
    place = config.run_dir / name
    if place.exists():
        place.rename(config.run_dir / "renamed")
    match what:
        case "file":
            place.touch()
        case "pipe":
            os.mkfifo(place)
        case _:
            place.symlink_to(name)
    with pytest.raises(ConfigError, match=f"run/{name} must be a directory, as runs make it, got something else; mo"):
        RunDirectory(config, ALONE).look().refuse()


@pytest.mark.parametrize("name", REPLACED_FILES)
def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    config = config_for(tmp_path / "run")
    leave(config, 4)
    (config.run_dir / name).mkdir()
    with pytest.raises(ConfigError, match=f"run/{name} must be a file, as runs write it, got a directory; move it"):
        RunDirectory(config, ALONE).look().refuse()


def test_files_that_are_no_runs_are_never_moved(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"files that are no run's \(no config.yaml among them\), got .*run,"):
        begin(config_for(tmp_path / "run", "never"))
    assert (tmp_path / "run" / "thesis.tex").read_text() == "mine"


# --- what is not as it was --------------------------------------------------------------------------------------------


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


def test_a_harmless_change_goes_on_and_is_recorded(tmp_path: Path) -> None:
    go_on(config_for(tmp_path, max_steps=5), 0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    longer = config_for(tmp_path, max_steps=10)
    assert go_on(longer) == ["changed after step 4: run.max_steps: 5 -> 10 (results do not depend on it)"]
    assert changes(tmp_path) == [{"step": 4, "name": "run.max_steps", "old": "5", "new": "10", "effect": "none"}]
    assert load_config(tmp_path / "config.yaml") == longer
    assert go_on(longer) == []


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints"])
def test_a_change_of_results_is_refused_unless_it_is_allowed(tmp_path: Path, left: str) -> None:
    go_on(config_for(tmp_path, seed=2), 0)
    assert go_on(config_for(tmp_path), 0) == []  # without a step there is nothing to compare
    assert load_config(tmp_path / "config.yaml").run.seed == 0
    if left == "checkpoints":
        (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    else:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
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


@pytest.mark.parametrize(
    ("lost", "names"),
    [
        ("config.yaml", "all"),
        ("sources.json", "rewards.0.name"),
        ("data.json", "data"),
        ("config.yaml sources.json data.json metrics.jsonl", "all"),
    ],
)
def test_without_the_records_of_its_checkpoints_a_run_goes_on_only_if_it_is_told(
    tmp_path: Path, lost: str, names: str
) -> None:
    """Nobody would notice that 0.1 goes on where 1e-3 began, or that the data is another."""
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    rewards = [{"name": f"{tmp_path}/mine.py:score"}]
    go_on(run_of(tmp_path / "run", rewards=rewards), 0)
    (tmp_path / "run/checkpoints/4").mkdir(parents=True)
    for name in lost.split():
        (tmp_path / "run" / name).unlink(missing_ok=True)
    other: dict[str, Any] = (
        {"rewards": rewards, "optimizer": {"learning_rate": 0.1}} if "config" in lost else {"rewards": rewards}
    )
    with pytest.raises(ConfigError) as caught:
        go_on(run_of(tmp_path / "run", **other))
    assert "lacks files that say so, and nothing can be compared" in str(caught.value)
    assert all(f": unknown, as {name} is missing" in str(caught.value) for name in lost.split()[:3])
    assert str(caught.value).endswith(f"or go on all the same with checkpoint.allow_changes='[{names}]'")
    allowed = run_of(tmp_path / "run", **other, checkpoint={"allow_changes": names.split(", ")})
    assert any(f"unknown, as {lost.split()[0]} is missing" in note for note in go_on(allowed))
    assert [note for note in go_on(allowed) if "unknown" in note] == []


def test_settings_that_no_checkpoint_goes_on_with_are_not_said_to_be_allowed(tmp_path: Path) -> None:
    leave(run_of(tmp_path / "run", model={"lora": {"rank": 2}}), 4)
    with pytest.raises(
        ConfigError, match=r"as no checkpoint goes on with another model\.lora\.rank, export its weights"
    ):
        go_on(run_of(tmp_path / "run", model={"lora": {"rank": 4}}))


def test_a_continued_run_is_as_it_was_when_its_start_fails(tmp_path: Path) -> None:
    go_on(config_for(tmp_path, max_steps=5), 0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(DataError, match="bad"), RunDirectory(config_for(tmp_path, max_steps=10), ALONE):
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
    with RunDirectory(config_for(run, seed=1), ALONE) as directory:
        directory.begin(0, {"digest": "a" * 64})
        before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [run, *run.iterdir()]}
        with pytest.raises(ConfigError, match=rf"{run} is in use by process {os.getpid()} on host .* since 20"):
            begin(config_for(run, resume, seed=2))
        assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [run, *run.iterdir()]} == before
        assert names(tmp_path) == ["run"]
    assert names(run) == ["config.yaml", "data.json", "logs", "sources.json"]


def test_a_moved_directory_stays_in_use(tmp_path: Path) -> None:
    leave_files(tmp_path / "run", "earlier")
    with RunDirectory(config_for(tmp_path / "run", "never"), ALONE) as directory:
        with pytest.raises(ConfigError, match="is in use by"):
            begin(config_for(tmp_path / "run"))
        directory.begin(0, {"digest": "a" * 64})
        with pytest.raises(ConfigError, match="is in use by"):
            begin(config_for(tmp_path / "run"))
        assert names(tmp_path / "run.1") == ["checkpoints", "config.yaml", "data.json", "metrics.jsonl", "sources.json"]
    assert names(tmp_path / "run") == ["config.yaml", "data.json", "logs", "sources.json"]


def test_a_directory_that_is_removed_moved_or_replaced_is_not_ours(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    with RunDirectory(config, ALONE) as directory:
        directory.begin(0, {"digest": "a" * 64})
        assert directory.is_ours()
        (tmp_path / "run" / "run.lock").unlink()
        assert directory.is_ours()
        (tmp_path / "run").rename(tmp_path / "moved")
        assert not directory.is_ours()
        (tmp_path / "run").mkdir()
        assert not directory.is_ours()
        apart = Path(directory.set_up_apart({"digest": "a" * 64}))
        assert apart == tmp_path / "run.1"
        assert load_config(apart / "config.yaml") == config
        assert names(apart) == ["config.yaml", "data.json", "sources.json"]
    assert names(tmp_path / "run") == []


def test_a_start_that_fails_leaves_an_earlier_run_in_place(tmp_path: Path) -> None:
    leave_files(tmp_path / "run", "earlier")
    with (
        pytest.raises(DataError, match="no such file"),
        RunDirectory(config_for(tmp_path / "run", "never"), ALONE),
    ):
        raise DataError("no such file")
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["checkpoints", "config.yaml", "data.json", "metrics.jsonl", "sources.json"]


def test_what_is_left_by_a_start_that_ends_after_the_move_is_a_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_files(tmp_path / "run", "earlier")
    never = config_for(tmp_path / "run", "never")
    with (
        monkeypatch.context() as patched,
        pytest.raises(KeyboardInterrupt),
        RunDirectory(never, ALONE) as directory,
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
    leave(config_for(tmp_path / "run"))
    with RunDirectory(config_for(tmp_path / "run"), ALONE) as directory:
        assert directory.saved_steps == (9, 10)


# --- what lies there before a start -----------------------------------------------------------------------------------


def finished(config: RunConfig) -> dict[str, Any] | None:
    earlier = RunDirectory(config, ALONE).look()
    earlier.refuse()
    return earlier.summary


def describe(config: RunConfig) -> list[str]:
    return RunDirectory(config, ALONE).look(guess=True).describe(config.run_dir, config.run, config.optimizer)


def state(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in [directory, *directory.rglob("*")]}


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    leave(config, 4, steps=4)
    before = state(tmp_path)
    assert finished(config) == {"steps": 4}
    assert how_it_ended(config.run, config.optimizer, {"steps": 4}) == (
        "this run is done: 4 of 4 steps; set run.max_steps higher to go on, or another run.dir"
    )
    ended = how_it_ended(config.run, config.optimizer, {"steps": 4})
    assert describe(config) == [f"run.dir    {tmp_path}/run: {ended}"]
    assert state(tmp_path) == before


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    leave(run_of(tmp_path / "run"), 2, 4, steps=4)
    longer = run_of(tmp_path / "run", 6, logging={"samples_every": 1})
    assert finished(longer) is None
    assert describe(longer) == [
        f"run.dir    {tmp_path}/run: the run there goes on after step 4",
        "changed    run.max_steps: 4 -> 6 (results do not depend on it)",
        "changed    logging.samples_every: 10 -> 1 (results do not depend on it)",
    ]
    assert finished(run_of(tmp_path / "run", 3)) == {"steps": 4}


def test_more_steps_of_a_falling_learning_rate_have_to_be_allowed(tmp_path: Path) -> None:
    cosine: Any = {"optimizer": {"schedule": "cosine"}}
    config = run_of(tmp_path / "run", **cosine)
    leave(config, 4, steps=4)
    assert how_it_ended(config.run, config.optimizer, {"steps": 4}) == (
        "this run is done: 4 of 4 steps; set run.max_steps higher with checkpoint.allow_changes=[run.max_steps], "
        "because the cosine schedule ends there, to go on, or another run.dir"
    )
    with pytest.raises(ConfigError, match=r"run\.max_steps: 4 -> 6"):
        finished(run_of(tmp_path / "run", 6, **cosine))
    allowed = run_of(tmp_path / "run", 6, checkpoint={"allow_changes": ["run.max_steps"]}, **cosine)
    assert finished(allowed) is None


def test_a_run_without_prompts_left_is_finished_too(tmp_path: Path) -> None:
    summary = {"steps": 3, "ended_early": "8 of 8 prompts are retired (data.retire); add harder prompts"}
    leave(run_of(tmp_path / "run"), 3, **summary)
    longer = run_of(tmp_path / "run", 9)
    assert finished(longer) == summary
    assert how_it_ended(longer.run, longer.optimizer, summary) == (
        "this run is done, after step 3 of 9: 8 of 8 prompts are retired (data.retire); add harder prompts"
    )
    changed = run_of(
        tmp_path / "run", max_steps=9, data={"retire": {"at": 0.9}}, checkpoint={"allow_changes": ["data"]}
    )
    assert finished(changed) is None


def test_a_run_that_was_killed_before_its_summary_is_not_finished(tmp_path: Path) -> None:
    leave(run_of(tmp_path / "run"), 4)
    assert finished(run_of(tmp_path / "run")) is None


def test_never_starts_over(tmp_path: Path) -> None:
    never = run_of(tmp_path / "run", checkpoint={"resume": "never"})
    leave(never, 4, steps=4)
    assert finished(never) is None
    (tmp_path / "run.1").mkdir()
    assert describe(never) == [f"run.dir    {tmp_path}/run: an earlier run's files will be moved to {tmp_path}/run.2"]


def test_another_runs_directory_is_refused_with_every_difference(tmp_path: Path) -> None:
    leave(run_of(tmp_path / "run"), 4, steps=4)
    other = run_of(
        tmp_path / "run", model={"path": "other"}, optimizer={"learning_rate": 1e-4}, rewards=[{"name": "math"}]
    )
    for ask in (finished, describe):
        with pytest.raises(ConfigError) as caught:
            ask(other)
        assert str(caught.value).splitlines()[1:-1] == [
            "  model.path: builtin:addition -> other",
            "  rewards.0.name: exact_answer -> math",
            "  optimizer.learning_rate: 1e-06 -> 0.0001",
        ]
        assert "checkpoint.allow_changes='[model.path, rewards.0.name, optimizer.learning_rate]'" in str(caught.value)


def test_a_changed_reward_is_refused_by_its_content(tmp_path: Path) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text("def short(completions): ...")
    config = run_of(tmp_path / "run", rewards=[{"name": f"{reward}:short"}])
    with RunDirectory(config, ALONE) as directory:
        directory.begin(0, {"digest": ""})
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert describe(config) == [f"run.dir    {tmp_path}/run: a run that starts at step 1"]
    reward.write_text("def short(completions): return 0")
    with pytest.raises(ConfigError, match=r"rewards\.0\.name: mine\.py sha256 \w{16} -> mine\.py sha256 \w{16}\n"):
        describe(config)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    leave(config, 4)
    (tmp_path / "run" / "config.yaml").write_text("run: {sed: 1}")
    with pytest.raises(ConfigError, match=r"run/config\.yaml must be the config of the run .* did you mean run\.seed"):
        describe(config)


@pytest.mark.parametrize("content", ["", "[1]", '{"steps": 4'])
def test_a_summary_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    config = run_of(tmp_path / "run")
    leave(config, 4)
    (tmp_path / "run" / "summary.json").write_text(content)
    with pytest.raises(DataError, match=r"run/summary\.json must hold a JSON object"):
        finished(config)


def test_what_a_dry_run_says_of_a_directory_in_use_or_without_a_checkpoint(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    lock = RunLock.take(tmp_path)
    with pytest.raises(ConfigError, match="is in use by process"):
        describe(config)
    lock.release()
    assert describe(config) == [f"run.dir    {tmp_path}: a run that starts at step 1"]
    with pytest.raises(CheckpointError, match="found none"):
        describe(run_of(tmp_path, checkpoint={"resume": "require"}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (None, "before, the run ended without a word: host 0 was killed"),
        (
            '{"outcome": "failed", "message": "LockstepError: lost host 1"}',
            "before, the run failed: LockstepError: lost",
        ),
        ("[1", "before, the run ended without a word"),
        ('{"outcome": "stopped", "message": "SIGTERM"}', ""),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_start_says_how_the_run_broke_off_before(tmp_path: Path, resume: str, end: str | None, said: str) -> None:
    config = config_for(tmp_path / "run", resume)
    assert not any(note.startswith("before") for note in every_note(config))
    if end is not None:
        (tmp_path / "run" / "end.json").write_text(end)
    assert [note[: len(said)] for note in every_note(config) if note.startswith("before")] == [said] * bool(said)
