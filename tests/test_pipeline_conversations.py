"""Whole runs whose completions are conversations: what is learnt from, what is written down, and how failures end."""

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.marks import marked
from tests.several.runs import laid_over, lines, settings, train
from tests.talking import AGENT_SETTINGS, SIZES, write_talking_files
from tests.test_pipeline import digests
from tpu_grpo.config import RunConfig, parse_config
from tpu_grpo.learner.teachers import TeacherReadings, Teachers
from tpu_grpo.models.tokenizers import build_tool_tokenizer, decode
from tpu_grpo.records.errors import EpisodeError
from tpu_grpo.records.stages import ScoredRollout

BAD = """
import os
import time


class Bad:
    '''Fails at the first turn of a conversation as ``how`` says for its question.'''

    def __init__(self, how):
        self.how = how

    def reset(self, question, **columns):
        self.fault, self.turns = self.how.get(question), 0

    def step(self, action):
        self.turns += 1
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "hang":
            time.sleep(1000)
        if self.fault == "raise":
            raise KeyError("x")
        return "go on", 0.25, self.turns == 4, {}
"""


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_talking_files(tmp_path_factory.mktemp("talking"))
    (directory / "bad.py").write_text(BAD)
    return directory


@pytest.fixture(scope="module")
def whole(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that others are compared with."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    with contextlib.chdir(talking):
        train(config(directory, evaluation={"path": "data.jsonl", "prompts": 4}))
    return directory


@pytest.fixture(autouse=True)
def _there(talking: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the directory of the files; no process that a run starts is left after it."""
    monkeypatch.chdir(talking)
    before = marked()
    yield
    assert marked() <= before


def config(run_dir: Path, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "logging": {"samples_every": 1},
        "meshes": {"layout": "split", "sampler": {"tensor": 2}},  # one engine to compile
        **SIZES,
    }
    return parse_config(laid_over(settings(run_dir, **tree), sections))


@pytest.mark.full
def test_agreement_over_eight_turns_and_what_is_written_down(whole: Path) -> None:
    for line in lines(whole):
        assert line["agreement/logprob_abs_diff_max"] <= 1e-4
        assert line["agreement/logprob_abs_diff_mean"] <= 1e-5
        assert line["episodes/turns_max"] == 8
        assert line["rewards/mean"] == pytest.approx(line["rewards/environment/mean"])
    rows = lines(whole, "samples.jsonl")
    assert len(rows) == 2 * 16
    for row in rows:
        assert sum(turn["reward"] for turn in row["turns"] if turn["reward"] is not None) == pytest.approx(
            row["reward"]
        )
        assert sum(turn["tokens"] for turn in row["turns"]) == row["tokens"]
    # a group begins alike: reset draws what its prompt's seed says
    assert {len({row["prompt"] for row in rows[start : start + 4]}) for start in range(0, 32, 4)} == {1}
    assert len({row["prompt"] for row in rows}) > 4


@pytest.mark.full
def test_a_teacher_has_its_hint_in_every_turn_and_teaches_what_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, read = list[tuple[Any, ...]](), Teachers.read

    def kept(self: Teachers, scored: ScoredRollout, *more: Any) -> TeacherReadings:
        readings, [teacher] = read(self, scored, *more), self.teachers
        seen.append((scored, teacher.prompts(scored, range(16))[1], readings))
        return readings

    monkeypatch.setattr(Teachers, "read", kept)
    teacher = {"hint": "It is {answer}.", "max_prompt_tokens": 64}
    train(config(tmp_path, run={"max_steps": 1}, algorithm={"name": "distill"}, teachers=[teacher]))
    [(scored, completions, readings)], tokenizer = seen, build_tool_tokenizer()
    turns, weights = 0, readings.known["teacher_weights"]
    for row, (prompt, plain, hinted) in enumerate(
        zip(scored.rollout.row_prompts, scored.rollout.completions, completions, strict=True)
    ):
        hint = f"It is {prompt.columns['answer']}."
        for own, with_hint in zip(plain.episode.branches, hinted.episode.branches, strict=True):
            texts = [decode(tokenizer, branch.prompt) for branch in (own, with_hint)]
            assert [text.count(hint) for text in texts] == [0, 1]
            assert texts[1].endswith(texts[0][-10:])
        turns += len(plain.episode.turns)
        assert weights[row, : len(plain.sampled)].tolist() == plain.sampled.astype(float).tolist()
        assert not weights[row, len(plain.sampled) :].any()
    assert turns > 32  # so there are later turns, and observations before them
    assert lines(tmp_path)[0]["teachers/self/kl"] > 0.0


@pytest.mark.full
def test_a_continued_run_repeats_the_episodes_that_it_had_and_an_agent_is_told_the_same(tmp_path: Path) -> None:
    """The agent gives rewards at random. A copy of the run as a kill after step 1 would leave it, with the episodes of
    step 2 written down, ends with the same parameters; without them it does not.

    It is told the same all the same, though its requests arrive after random delays, so in other orders.
    """
    agent = {
        **AGENT_SETTINGS,
        "options": {**AGENT_SETTINGS["options"], "command": [sys.executable, "agent.py", "lucky"]},
    }
    whole, killed, played = tmp_path / "whole", tmp_path / "killed", tmp_path / "played"
    saving = {"every": 1, "keep": 2}
    ended = train(config(whole, environment=agent, checkpoint=saving))
    for copy in (killed, played):
        shutil.copytree(whole, copy)
        shutil.rmtree(copy / "checkpoints" / "2")
    (played / "episodes" / "2.host_0.jsonl").unlink()
    found = [train(config(copy, environment=agent, checkpoint=saving))["params_digest"] for copy in (killed, played)]
    assert [digest == ended["params_digest"] for digest in found] == [True, False]
    assert len((killed / "episodes" / "2.host_0.jsonl").read_text().splitlines()) == 16
    assert digests(played) == digests(whole)
    for line in lines(whole):
        assert line["agreement/logprob_abs_diff_mean"] <= 1e-5
        assert line["episodes/turns_max"] >= 4
    assert {len(row["turns"]) for row in lines(whole, "samples.jsonl")} > {1}


@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param({"prefix_cache": False}, id="no prefix cache", marks=pytest.mark.slow),
        pytest.param({"kv_tokens": 260}, id="little cache", marks=pytest.mark.slow),
        pytest.param({"steps_per_launch": 1}, id="single steps", marks=pytest.mark.slow),
    ],
)
def test_how_the_engine_works_changes_no_token(whole: Path, tmp_path: Path, rollout: dict[str, Any]) -> None:
    """With little cache few conversations are begun at once; test_turn_scheduler.py has some that are put back in a
    turn."""
    train(config(tmp_path / "other", run={"max_steps": 1}, rollout=rollout))
    [line] = lines(tmp_path / "other")
    assert line["rollout/tokens_digest"] == digests(whole)[1]
    assert line["agreement/logprob_abs_diff_max"] <= 1e-4
    assert line["agreement/logprob_abs_diff_mean"] <= 1e-5


@pytest.mark.full
def test_bad_environments_end_their_own_conversations(tmp_path: Path) -> None:
    """A conversation whose first turn does not end never gets to its environment."""
    how = {"1": "raise", "4": "raise", "2": "exit", "5": "exit", "3": "hang", "6": "hang"}
    bad = {
        "name": "bad.py:Bad",
        "options": {"how": {f"{n}+1=": fault for n, fault in how.items()}},
        "on_error": "value",
        "error_value": -1.0,
        "timeout": 4.0,
    }
    train(config(tmp_path / "run", environment=bad))
    rows = lines(tmp_path / "run", "samples.jsonl")
    assert len(rows) == 32  # each of the eight prompts once, four conversations each
    failed = [row for row in rows if row["ending"] == "failed"]
    assert {row["reward"] for row in failed} == {-1.0}
    assert all(row["reward"] >= 0 for row in rows if row["ending"] != "failed")
    faults = Counter(how[row["prompt"].split("+1=")[0][-1]] for row in failed)
    assert faults.keys() == {"raise", "exit", "hang"}
    for fault, kind in (("raise", "raised"), ("exit", "died"), ("hang", "late")):
        shares = [line.get(f"episodes/failed_{kind}", 0.0) for line in lines(tmp_path / "run")]
        assert faults[fault] == pytest.approx(sum(shares) * 16)


@pytest.mark.full
def test_a_bad_environment_ends_the_run_if_it_shall(tmp_path: Path) -> None:
    bad = {"name": "bad.py:Bad", "options": {"how": {f"{n}+1=": "raise" for n in range(8)}}}
    with pytest.raises(
        EpisodeError, match=r"environment Bad raised KeyError: 'x' .*bad.py:\d+ in step.*on_error to skip"
    ):
        train(config(tmp_path / "run", environment=bad))
