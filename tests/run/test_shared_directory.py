"""What hosts do with the directory they share, between real processes; nothing is built, so that they cost little."""

from pathlib import Path

import pytest

from tests.hosts.processes import run
from tpu_grpo.config import parse_config
from tpu_grpo.run.lock import RunLock

ENTER = """
    from pathlib import Path
    from tpu_grpo.config import parse_config
    from tpu_grpo.run import directory as sharing
    from tpu_grpo.run.directory import RunDirectory
    sharing.SEEN_SECONDS, sharing.STALE_SECONDS, sharing.PAUSE = 1.0, 1.0, 0.1
    resume = "auto"
    {before}
    config = parse_config({{"run": {{"dir": {directory}}}, "checkpoint": {{"resume": resume}}}})
    with RunDirectory(config, hosts) as own:
        {inside}
        print(own.saved_steps, own.begin(0, {{"digest": ""}}))
    hosts.barrier("the end")
"""


def enter(directory: str, before: str = "pass", inside: str = "pass") -> str:
    return ENTER.format(directory=directory, before=before, inside=inside)


def leave_run(directory: Path, *steps: int) -> None:
    for step in steps:
        (directory / "checkpoints" / str(step)).mkdir(parents=True)
    (directory / "config.yaml").write_text(parse_config({"run": {"dir": str(directory)}}).to_yaml())
    (directory / "data.json").write_text('{"digest": ""}')
    (directory / "end.json").write_text('{"outcome": "done", "message": ""}')


@pytest.mark.full
def test_a_host_with_a_directory_of_its_own_is_named_by_all(tmp_path: Path) -> None:
    ended = run(enter(f"f'{tmp_path}/{{index}}/run'"), 2)
    for end in ended.values():
        assert end.code == 2, end
        assert "ConfigError: run.dir must be one directory that all hosts share, got " in end.errors
        assert f"has written to {tmp_path}/0/run on " in end.errors
        assert f"is not there for host 1 ({tmp_path}/1/run on " in end.errors
        assert end.at < 60
    assert [path.name for path in tmp_path.rglob("*")] == ["0"]  # the directory it would have lain in


@pytest.mark.full
def test_a_live_runs_directory_is_refused_on_every_host(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path)
    ended = run(enter(repr(str(tmp_path))), 2)
    for end in ended.values():
        assert end.code == 2, end
        assert f"{tmp_path} is in use by process {lock.owner.process} on host {lock.owner.host} since" in end.errors
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_earlier_run_is_moved_once_and_all_log_in_the_new_one(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", 4)
    ended = run(enter(repr(str(tmp_path / "run")), before="resume = 'never'"), 2)
    assert [(end.code, end.out) for end in ended.values()] == [
        (0, f'() ["an earlier run\'s files were moved to {tmp_path}/run.1"]\n')
    ] * 2, ended
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == ["host_0.log", "host_1.log"]
    assert not (tmp_path / "run.1" / "logs").exists()


@pytest.mark.full
def test_hosts_wait_until_they_see_the_same_checkpoints_and_log_in_one_place(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", 2, 4)
    late = "real = sharing.saved_steps; seen = []; sharing.saved_steps = lambda path: (seen.append(0) or real(path))"
    late += "[: 1 if index == 1 and len(seen) < 4 else 2]"
    ended = run(enter(repr(str(tmp_path / "run")), before=late), 2)
    assert [(end.code, end.out) for end in ended.values()] == [(0, "(2, 4) []\n")] * 2, ended
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == ["host_0.log", "host_1.log"]
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.slow
def test_hosts_that_see_other_checkpoints_end(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", 2, 4)
    before = "real = sharing.saved_steps; sharing.saved_steps = lambda path: real(path)[: 2 - index]"
    ended = run(enter(repr(str(tmp_path / "run")), before=before), 2)
    for end in ended.values():
        assert end.code == 3, end
        assert "the steps saved in checkpoints differs: host 0 has '[2, 4]'; host 1 has '[2]'" in end.errors
