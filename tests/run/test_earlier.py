"""What lies in run.dir before a start: a run that is done, one that goes on, another one, or nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import CheckpointError, ConfigError, DataError
from tpu_grpo.run.earlier import describe, finished, how_it_ended
from tpu_grpo.run.lock import RunLock

ALONE = Hosts()


def config_for(directory: Path, max_steps: int = 4, **sections: Any) -> RunConfig:
    return parse_config({"run": {"dir": str(directory), "max_steps": max_steps}, **sections})


def leave(config: RunConfig, *saved: int, **summary: Any) -> None:
    """What a run leaves that has done steps; with a summary if it has come to its end."""
    directory = config.run_dir
    directory.mkdir()
    (directory / "config.yaml").write_text(config.to_yaml())
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    for step in saved:
        (directory / "checkpoints" / str(step)).mkdir(parents=True)
    if summary:
        (directory / "summary.json").write_text(json.dumps(summary))


def state(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in [directory, *directory.rglob("*")]}


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    leave(config, 4, steps=4)
    before = state(tmp_path)
    assert finished(config, ALONE) == {"steps": 4}
    assert how_it_ended(config, {"steps": 4}) == (
        "this run is done: 4 of 4 steps; set run.max_steps higher to go on, or another run.dir"
    )
    assert describe(config, ALONE) == [f"run.dir    {tmp_path}/run: {how_it_ended(config, {'steps': 4})}"]
    assert state(tmp_path) == before


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    leave(config_for(tmp_path / "run"), 2, 4, steps=4)
    longer = config_for(tmp_path / "run", 6, logging={"samples_every": 1})
    assert finished(longer, ALONE) is None
    assert describe(longer, ALONE) == [
        f"run.dir    {tmp_path}/run: the run there goes on after step 4",
        "changed    run.max_steps: 4 -> 6 (results do not depend on it)",
        "changed    logging.samples_every: 10 -> 1 (results do not depend on it)",
    ]
    assert finished(config_for(tmp_path / "run", 3), ALONE) == {"steps": 4}


def test_more_steps_of_a_falling_learning_rate_have_to_be_allowed(tmp_path: Path) -> None:
    cosine: Any = {"optimizer": {"schedule": "cosine"}}
    config = config_for(tmp_path / "run", **cosine)
    leave(config, 4, steps=4)
    assert how_it_ended(config, {"steps": 4}) == (
        "this run is done: 4 of 4 steps; set run.max_steps higher with checkpoint.allow_changes=[run.max_steps], "
        "because the cosine schedule ends there, to go on, or another run.dir"
    )
    with pytest.raises(ConfigError, match=r"run\.max_steps: 4 -> 6"):
        finished(config_for(tmp_path / "run", 6, **cosine), ALONE)
    allowed = config_for(tmp_path / "run", 6, checkpoint={"allow_changes": ["run.max_steps"]}, **cosine)
    assert finished(allowed, ALONE) is None


def test_a_run_without_prompts_left_is_finished_too(tmp_path: Path) -> None:
    summary = {"steps": 3, "ended_early": "8 of 8 prompts are retired (data.retire); add harder prompts"}
    leave(config_for(tmp_path / "run"), 3, **summary)
    longer = config_for(tmp_path / "run", 9)
    assert finished(longer, ALONE) == summary
    assert how_it_ended(longer, summary) == (
        "this run is done, after step 3 of 9: 8 of 8 prompts are retired (data.retire); add harder prompts"
    )
    changed = config_for(tmp_path / "run", 9, data={"retire": {"at": 0.9}}, checkpoint={"allow_changes": ["data"]})
    assert finished(changed, ALONE) is None


def test_a_run_that_was_killed_before_its_summary_is_not_finished(tmp_path: Path) -> None:
    leave(config_for(tmp_path / "run"), 4)
    assert finished(config_for(tmp_path / "run"), ALONE) is None


def test_never_starts_over(tmp_path: Path) -> None:
    never = config_for(tmp_path / "run", checkpoint={"resume": "never"})
    leave(never, 4, steps=4)
    assert finished(never, ALONE) is None
    (tmp_path / "run.1").mkdir()
    assert describe(never, ALONE) == [
        f"run.dir    {tmp_path}/run: an earlier run's files will be moved to {tmp_path}/run.2"
    ]


def test_another_runs_directory_is_refused_with_every_difference(tmp_path: Path) -> None:
    leave(config_for(tmp_path / "run"), 4, steps=4)
    other = config_for(
        tmp_path / "run", model={"path": "other"}, optimizer={"learning_rate": 1e-4}, rewards=[{"name": "math"}]
    )
    for look in (finished, describe):
        with pytest.raises(ConfigError) as caught:
            look(other, ALONE)
        assert str(caught.value).splitlines()[1:-1] == [
            "  model.path: builtin:addition -> other",
            "  rewards.0.name: exact_answer -> math",
            "  optimizer.learning_rate: 1e-06 -> 0.0001",
        ]
        assert "checkpoint.allow_changes='[model.path, rewards.0.name, optimizer.learning_rate]'" in str(caught.value)


def test_a_changed_reward_is_refused_by_its_content(tmp_path: Path) -> None:
    from tpu_grpo.run.directory import RunDirectory

    reward = tmp_path / "mine.py"
    reward.write_text("def short(completions): ...")
    config = config_for(tmp_path / "run", rewards=[{"name": f"{reward}:short"}])
    with RunDirectory(config, ALONE) as directory:
        directory.begin(0, {"digest": ""})
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert describe(config, ALONE) == [f"run.dir    {tmp_path}/run: a run that starts at step 1"]
    reward.write_text("def short(completions): return 0")
    with pytest.raises(ConfigError, match=r"rewards\.0\.name: mine\.py sha256 \w{16} -> mine\.py sha256 \w{16}\n"):
        describe(config, ALONE)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    leave(config, 4)
    (tmp_path / "run" / "config.yaml").write_text("run: {sed: 1}")
    with pytest.raises(ConfigError, match=r"run/config\.yaml must be the config of the run .* did you mean run\.seed"):
        describe(config, ALONE)


@pytest.mark.parametrize("content", ["", "[1]", '{"steps": 4'])
def test_a_summary_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    config = config_for(tmp_path / "run")
    leave(config, 4)
    (tmp_path / "run" / "summary.json").write_text(content)
    with pytest.raises(DataError, match=r"run/summary\.json must hold a JSON object"):
        finished(config, ALONE)


def test_what_a_dry_run_says_of_a_directory_in_use_or_without_a_checkpoint(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    lock = RunLock.take(tmp_path)
    with pytest.raises(ConfigError, match="is in use by process"):
        describe(config, ALONE)
    lock.release()
    assert describe(config, ALONE) == [f"run.dir    {tmp_path}: a run that starts at step 1"]
    with pytest.raises(CheckpointError, match="found none"):
        describe(config_for(tmp_path, checkpoint={"resume": "require"}), ALONE)
    assert list(tmp_path.iterdir()) == []
