"""What agents said is read back as it was written; torn and foreign lines are told apart."""

from pathlib import Path

import pytest

from tpu_grpo.environments.actions import Answered, Ended
from tpu_grpo.environments.episode_record import EpisodeRecord, digest_of
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.records.stages import SampleKey

KEY = SampleKey(7, 3, 2, 1)
REPLIES = [
    (digest_of([]), Answered((), request='{"text": "\\u00e9"}')),
    (digest_of([1, 2]), Answered((), done=True)),
    (digest_of([1, 2]), Ended(0.1 + 0.2)),
]


def test_episodes_are_read_back_by_a_later_process(tmp_path: Path) -> None:
    record, other = EpisodeRecord(tmp_path / "episodes", 0), EpisodeRecord(tmp_path / "episodes", 1)
    assert record.replies(KEY) is None
    record.write(KEY, REPLIES)
    assert record.replies(KEY) is None  # this process plays the step itself
    failed = [(digest_of([]), Failure("late", "did not answer", reward=None))]
    other.write(SampleKey(7, 3, 2, 0), failed)
    later = EpisodeRecord(tmp_path / "episodes", 0)
    assert later.replies(KEY) == REPLIES
    assert later.replies(SampleKey(7, 3, 2, 0)) == failed
    assert later.replies(SampleKey(7, 4, 2, 1)) is None


def test_a_torn_line_is_played_again_and_a_foreign_one_refused(tmp_path: Path) -> None:
    record = EpisodeRecord(tmp_path, 0)
    record.write(KEY, REPLIES)
    record.write(SampleKey(7, 3, 2, 2), REPLIES)
    path = tmp_path / "3.host_0.jsonl"
    path.write_text(path.read_text()[:-10])
    later = EpisodeRecord(tmp_path, 0)
    assert later.replies(SampleKey(7, 3, 2, 2)) is None
    assert later.replies(KEY) == REPLIES
    later.write(SampleKey(7, 3, 2, 2), REPLIES)
    assert len(path.read_text().splitlines()) == 2
    path.write_text("so so\n")
    with pytest.raises(EpisodeError, match="must hold an episode in each line, got 'so so'"):
        EpisodeRecord(tmp_path, 0).replies(KEY)
