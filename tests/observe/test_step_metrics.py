"""What is measured of a step and its conversations, worked out by hand."""

import hashlib
import struct

import numpy as np
import pytest

from tests.observe.samples import NAN, completion, scored_rollout
from tests.talks import talk
from tpu_grpo.observe.sample_rows import conversation_fields
from tpu_grpo.observe.step_metrics import (
    episode_metrics,
    rollout_metrics,
    sync_metrics,
    tokens_digest,
    update_metrics,
    zero_variance_fraction,
)
from tpu_grpo.records.episode import Failure
from tpu_grpo.records.stages import Prompt, PromptBatch, Rollout, ScoredRollout, Scores, SyncResult, UpdateResult

# --- steps ------------------------------------------------------------------------------------------------------------


def test_values_of_a_step_worked_out_by_hand() -> None:
    metrics = rollout_metrics(scored_rollout())
    digest = metrics.pop("rollout/tokens_digest")
    assert isinstance(digest, str)
    assert metrics == pytest.approx(
        {
            "rewards/mean": 1.0,  # (1 + 1 + 0 + 2) / 4
            "rewards/std": 0.5**0.5,  # population: (0 + 0 + 1 + 1) / 4, root
            "rewards/gsm8k/mean": 0.5,  # over the two rows it applies to
            "rewards/gsm8k/std": 0.5,
            "rewards/brevity/mean": 0.5,
            "rewards/brevity/std": 0.125**0.5,
            "rewards/seconds": 0.25,
            "groups/zero_variance_fraction": 0.5,  # [1 1] of [1 1] [0 2]
            "completions/mean_tokens": 3.0,  # 1, 3, 2, 6
            "completions/truncated_fraction": 0.25,
            "rollout/seconds": 4.0,
            "rollout/tokens_per_second": 3.0,  # 12 tokens in 4 s
            "rollout/wait_seconds": 2.5,  # as the engines said
        }
    )


def test_a_reward_that_applies_to_no_row_has_no_mean() -> None:
    metrics = rollout_metrics(scored_rollout(by_name={"gsm8k": [NAN] * 4, "format": [NAN, NAN, NAN, 1.0]}))
    assert "rewards/gsm8k/mean" not in metrics
    assert metrics["rewards/format/mean"] == 1.0


def test_groups_of_equal_rewards_whatever_their_level() -> None:
    assert zero_variance_fraction(np.array([[1.0, 1, 1], [0, 1, 0], [0, 0, 0]])) == pytest.approx(2 / 3)
    assert zero_variance_fraction(np.array([[0.0, 1e-12]])) == 0.0


def test_digest_is_of_little_endian_lengths_and_ids() -> None:
    expected = hashlib.sha256(struct.pack("<q2i", 2, 1, 70000) + struct.pack("<q", 0) + struct.pack("<qi", 1, -1))
    assert tokens_digest([completion([1, 70000]), completion([]), completion([-1])]) == expected.hexdigest()


def test_digest_tells_boundaries_and_order_apart() -> None:
    layouts = ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[1, 2, 3]])
    assert len({tokens_digest([completion(row) for row in rows]) for rows in layouts}) == len(layouts)


def test_update_and_sync_add_their_seconds() -> None:
    update = UpdateResult({"update/loss": 0.5, "agreement/kl": 0.1}, np.zeros(4), seconds=2.0)
    assert update_metrics(update) == {"update/loss": 0.5, "agreement/kl": 0.1, "update/seconds": 2.0}
    assert sync_metrics(SyncResult(0.5, 1024)) == {"weights/sync_seconds": 0.5, "weights/bytes_moved": 1024}


# --- conversations ----------------------------------------------------------------------------------------------------

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
    assert [turn["observed_tokens"] for turn in conversation_fields(seven)["turns"]] == [2, 0]
