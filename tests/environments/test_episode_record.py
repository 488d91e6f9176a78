"""What agents said is read back as it was written; torn and foreign lines are told apart."""

from dataclasses import replace
from pathlib import Path

import pytest

from tpu_grpo.environments.actions import Answered, Ended, LoadedEnvironment
from tpu_grpo.environments.episode_record import EpisodeRecord, task_of
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.records.stages import SampleKey

KEY = SampleKey(7, 3, 2, 1)
REPLIES = [
    ("before", Answered((), request='{"text": "\\u00e9"}')),
    ("after", Answered((), done=True)),
    ("after", Ended(0.1 + 0.2)),
]


def test_episodes_are_read_back_by_a_later_process(tmp_path: Path) -> None:
    record, other = EpisodeRecord(tmp_path / "episodes", 0), EpisodeRecord(tmp_path / "episodes", 1)
    assert record.replies(KEY, "task") is None
    record.write(KEY, "task", REPLIES)
    assert record.replies(KEY, "task") is None  # this process plays the step itself
    failed = [("before", Failure("late", "did not answer", reward=None))]
    other.write(SampleKey(7, 3, 2, 0), "task", failed)
    later = EpisodeRecord(tmp_path / "episodes", 0)
    assert later.replies(KEY, "task") == REPLIES
    assert later.replies(SampleKey(7, 3, 2, 0), "task") == failed
    assert later.replies(SampleKey(7, 4, 2, 1), "task") is None
    assert later.replies(KEY, "another task") is None
    later.forget(2)
    assert len(list((tmp_path / "episodes").iterdir())) == 2
    later.forget(3)
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["3.host_1.jsonl"]  # the other host's


def test_a_task_is_what_the_agent_is_given(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text("print(1)")
    agent = LoadedEnvironment("Agent", "agent:Agent", "answers", options={"command": ["python", str(script)]})
    task = task_of(agent, {"question": "1"})
    assert task_of(agent, {"question": "2"}) != task
    assert task_of(replace(agent, options={**agent.options, "lasting": True}), {"question": "1"}) != task
    script.write_text("print(2)")
    assert task_of(agent, {"question": "1"}) != task


def test_a_torn_line_is_played_again_and_a_foreign_one_refused(tmp_path: Path) -> None:
    record = EpisodeRecord(tmp_path, 0)
    record.write(KEY, "task", REPLIES)
    record.write(SampleKey(7, 3, 2, 2), "task", REPLIES)
    path = tmp_path / "3.host_0.jsonl"
    path.write_text(path.read_text()[:-10])
    later = EpisodeRecord(tmp_path, 0)
    assert later.replies(SampleKey(7, 3, 2, 2), "task") is None
    assert later.replies(KEY, "task") == REPLIES
    later.write(SampleKey(7, 3, 2, 2), "task", REPLIES)
    assert len(path.read_text().splitlines()) == 2
    path.write_text("so so\n")
    with pytest.raises(EpisodeError, match="must hold an episode in each line, got 'so so'"):
        EpisodeRecord(tmp_path, 0).replies(KEY, "task")
