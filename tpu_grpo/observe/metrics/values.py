"""Turns the records of the stages into metric values, under the names of ``metrics.jsonl``.

Array suffixes: P prompts, G completions per prompt, B = P*G rows. A mean over rows is a plain mean of the B rows.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tpu_grpo.observe.metrics.episodes import episode_metrics
from tpu_grpo.records.stages import Completion, ScoredRollout, Scores, SyncResult, UpdateResult

MetricValue = float | int | str


def rollout_metrics(scored: ScoredRollout) -> dict[str, float | str]:
    """Compute ``rewards/*``, ``groups/*``, ``completions/*``, ``episodes/*``, ``turns/*`` and ``rollout/*`` of a step.

    Standard deviations are population ones; times are in seconds. A reward that applies to no row has no mean, and rows
    that no reward applies to count in none.
    """
    rollout, scores = scored.rollout, scored.scores
    return {
        **_reward_values(scores),
        "groups/zero_variance_fraction": zero_variance_fraction(scores.total.reshape(-1, rollout.group_size)),
        **_completion_values(rollout.completions),
        **episode_metrics(rollout.completions),
        "rollout/seconds": float(rollout.seconds),
        "rollout/tokens_per_second": rollout.total_tokens / rollout.seconds if rollout.seconds > 0 else float("nan"),
        "rollout/tokens_digest": tokens_digest(rollout.completions),
        **rollout.figures,
    }


def update_metrics(result: UpdateResult) -> dict[str, float]:
    """Pass on the learner's ``update/*`` and ``agreement/*``, and add ``update/seconds``."""
    return {**{name: float(value) for name, value in result.metrics.items()}, "update/seconds": float(result.seconds)}


def sync_metrics(result: SyncResult) -> dict[str, float | int]:
    """Report the seconds and the bytes of one weight sync as ``weights/*``."""
    return {"weights/sync_seconds": float(result.seconds), "weights/bytes_moved": int(result.bytes_moved)}


def zero_variance_fraction(totals_PG: Float[np.ndarray, "P G"]) -> float:
    """Return the fraction of groups whose G rewards are all equal, and which therefore teach nothing.

    For groups ``[1 1 1]``, ``[0 1 0]`` and ``[0 0 0]`` it is 2/3.
    """
    return float(np.mean(np.all(totals_PG == totals_PG[:, :1], axis=1)))


def tokens_digest(completions: Sequence[Completion]) -> str:
    """Compute the SHA-256 (hex) of all token ids after the prompts, by which two rollouts are compared bit by bit.

    The hashed bytes are, for each row in order, the number of its tokens as a little-endian int64 and then its token
    ids as little-endian int32. The lengths keep ``[1 2] [3]`` apart from ``[1] [2 3]``. Behind the tokens of a
    conversation come the prompts of its branches in the same way: they hold what ``reset`` gave, and the answers of the
    environment where the template changes the past.
    """
    digest = hashlib.sha256()
    for completion in completions:
        branches = () if completion.episode is None else completion.episode.branches
        for ids in (completion.token_ids, *(branch.prompt for branch in branches)):
            digest.update(np.int64(len(ids)).astype("<i8").tobytes())
            digest.update(np.asarray(ids).astype("<i4").tobytes())
    return digest.hexdigest()


def _reward_values(scores: Scores) -> dict[str, float]:
    totals = scores.total[scores.scored] if scores.scored.any() else scores.total
    values = {"rewards/mean": float(np.mean(totals)), "rewards/std": float(np.std(totals))}
    for name, rewards_B in scores.by_name.items():
        applies_B = ~np.isnan(rewards_B)
        if applies_B.any():
            values[f"rewards/{name}/mean"] = float(np.mean(rewards_B[applies_B]))
            values[f"rewards/{name}/std"] = float(np.std(rewards_B[applies_B]))
    values |= {name: figure.value for name, figure in scores.figures.items()}
    return values | {"rewards/seconds": float(scores.seconds)}


def _completion_values(completions: Sequence[Completion]) -> dict[str, float]:
    return {
        "completions/mean_tokens": float(np.mean([c.sampled_tokens for c in completions])),
        "completions/truncated_fraction": float(np.mean([c.finish_reason == "length" for c in completions])),
    }
