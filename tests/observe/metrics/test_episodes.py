"""What is measured of conversations, worked out by hand."""

import hashlib
import struct

import numpy as np
import pytest

from tests.observe.metrics.samples import completion
from tests.talks import talk
from tpu_grpo.observe.metrics.conversations import sampled_conversation
from tpu_grpo.observe.metrics.episodes import episode_metrics
from tpu_grpo.observe.metrics.values import rollout_metrics, tokens_digest
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.stages import Prompt, PromptBatch, Rollout, ScoredRollout, Scores

TALKS = (
    talk([1], ([3, 4], [5]), ([6], [7, 8]), ([9], []), prompts={2: [1, 2]}, ending="done", seconds=3.0,
         turns={0: {"calls": ("add", ""), "errors": 1}, 1: {"calls": ("add",)}}),
    talk([1], ([3] * 5, [4, 4]), ending="tokens"),
    talk([1], ([3], [4]), ending="failed", failure=Failure("late", "did not answer"), seconds=1.0),
    talk([1], ([3] * 4, []), ending="answered", turns={0: {"errors": 2}}),
)  # fmt: skip


def test_values_by_hand() -> None:
    """Four conversations of 3, 1, 1 and 1 turns; they sampled 4, 5, 1 and 4 tokens, and observed 3, 2, 1 and 0."""
    found = episode_metrics([*TALKS, completion([1, 2, 3])])
    assert found == pytest.approx(
        {
            "episodes/turns_mean": 1.5,
            "episodes/turns_max": 3,
            "episodes/calls_mean": 0.75,
            "episodes/tokens_mean": 3.5,
            "episodes/observation_tokens_mean": 1.5,
            "episodes/branches_mean": 1.25,
            "episodes/truncated_fraction": 0.25,
            "episodes/ended_answered": 0.25,
            "episodes/ended_done": 0.25,
            "episodes/ended_turns": 0.0,
            "episodes/ended_tokens": 0.25,
            "episodes/ended_failed": 0.25,
            "episodes/failed_fraction": 0.25,
            "episodes/failed_late": 0.25,
            "episodes/wait_seconds_mean": 1.0,
            "episodes/wait_seconds_max": 3.0,
            "turns/tokens_mean": 14 / 6,
            "turns/bad_calls": 0.5,
        }
    )
    assert episode_metrics([completion([1])]) == {}


def test_several_environments_are_told_apart() -> None:
    talks = (
        talk([1], ([3], [5]), ([6], []), environment="code", reward=0.5),
        talk([1], ([3], []), environment="game", ending="failed", failure=Failure("late", "did not answer")),
        talk([1], ([3], []), environment="code", reward=1.0),
        talk([1], ([3], []), environment="code"),
    )
    found = {name: value for name, value in episode_metrics(talks).items() if name.count("/") == 2}
    assert found == pytest.approx(
        {
            "episodes/code/share": 0.75,
            "episodes/code/turns_mean": 4 / 3,
            "episodes/code/failed_fraction": 0.0,
            "episodes/code/reward_mean": 0.75,
            "episodes/game/share": 0.25,
            "episodes/game/turns_mean": 1.0,
            "episodes/game/failed_fraction": 1.0,
        }
    )


def test_tokens_of_a_step_are_those_that_were_sampled() -> None:
    prompts = (Prompt("", (1,)), Prompt("", (2,)))
    rollout = Rollout(PromptBatch(1, prompts), 2, TALKS, ("",) * 4, seconds=2.0)
    assert rollout.mean_tokens == (4.5, 2.5)
    assert rollout.total_tokens == 14
    found = rollout_metrics(ScoredRollout(rollout, Scores(np.zeros(4), {}, 0.0)))
    assert found["completions/mean_tokens"] == 3.5
    assert found["rollout/tokens_per_second"] == 7.0
    assert found["episodes/turns_mean"] == 1.5


def test_answers_in_the_prompt_of_a_later_branch_are_counted_and_are_a_part_of_the_digest() -> None:
    """Where the template changes the past, an answer stands in no completion, but at the end of the next prompt."""
    seven, eight = (
        talk([1], ([3], []), ([4], []), prompts={1: [1, answer, 2]}, turns={0: {"observed": 2}}) for answer in (7, 8)
    )
    assert seven.token_ids.tolist() == eight.token_ids.tolist() == [3, 4]
    expected = struct.pack("<q2i", 2, 3, 4) + struct.pack("<qi", 1, 1) + struct.pack("<q3i", 3, 1, 7, 2)
    assert tokens_digest([seven]) == hashlib.sha256(expected).hexdigest()
    assert tokens_digest([seven]) != tokens_digest([eight])
    assert episode_metrics([seven])["episodes/observation_tokens_mean"] == 2.0
    conversation = sampled_conversation(seven)
    assert conversation is not None
    assert [turn.observed_tokens for turn in conversation.turns] == [2, 0]
