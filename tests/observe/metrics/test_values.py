import hashlib
import struct

import numpy as np
import pytest

from tests.observe.metrics.samples import NAN, completion, scored_rollout
from tpu_grpo.observe.metrics.values import (
    rollout_metrics,
    sync_metrics,
    tokens_digest,
    update_metrics,
    zero_variance_fraction,
)
from tpu_grpo.records.stages import SyncResult, UpdateResult


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
