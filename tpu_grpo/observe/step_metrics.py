"""Turns the records of the stages into metric values, under the names of ``metrics.jsonl`` (docs/metrics.md).

Array suffixes: P prompts, G completions per prompt, B = P*G rows, E the completions that are conversations. A mean over
rows is a plain mean of the B rows; a mean over turns is over all turns of all conversations.
"""

import hashlib
from collections.abc import Sequence
from typing import get_args

import numpy as np
from jaxtyping import Float

from tpu_grpo.records.episode import Ending
from tpu_grpo.records.stages import Completion, ScoredRollout, Scores, SyncResult, UpdateResult, differ

MetricValue = float | int | str


def rollout_metrics(scored: ScoredRollout) -> dict[str, float | str]:
    """Compute ``rewards/*``, ``groups/*``, ``completions/*``, ``episodes/*``, ``turns/*`` and ``rollout/*`` of a step.

    Standard deviations divide by the number of rows; times are in seconds. A reward that applies to no row has no mean.
    Rows to which no reward applies are left out of ``rewards/mean`` and ``rewards/std``.
    """
    rollout, scores = scored.rollout, scored.scores
    return {
        **_reward_values(scores),
        **_group_values(scores, rollout.group_size),
        "completions/mean_tokens": float(np.mean([c.sampled_tokens for c in rollout.completions])),
        "completions/truncated_fraction": float(np.mean([c.finish_reason == "length" for c in rollout.completions])),
        **episode_metrics(rollout.completions),
        "rollout/seconds": float(rollout.seconds),
        "rollout/tokens_per_second": rollout.total_tokens / rollout.seconds if rollout.seconds > 0 else float("nan"),
        "rollout/tokens_digest": tokens_digest(rollout.completions),
        **rollout.figures,
    }


def update_metrics(result: UpdateResult) -> dict[str, float]:
    """Return the learner's ``update/*`` and ``agreement/*`` with ``update/seconds``."""
    return {**{name: float(value) for name, value in result.metrics.items()}, "update/seconds": float(result.seconds)}


def sync_metrics(result: SyncResult) -> dict[str, float | int]:
    """Report the seconds and the bytes of one weight sync as ``weights/*``."""
    return {"weights/sync_seconds": float(result.seconds), "weights/bytes_moved": int(result.bytes_moved)}


def zero_variance_fraction(totals_PG: Float[np.ndarray, "P G"]) -> float:
    """Return the fraction of groups whose rewards do not differ (see `differ`), and which therefore teach nothing.

    For groups ``[1 1 1]``, ``[0 1 0]`` and ``[0 0 nan]`` it is 2/3.
    """
    return float(np.mean(~differ(totals_PG)))


def tokens_digest(completions: Sequence[Completion]) -> str:
    """Compute the SHA-256 (hex) of all token ids after the prompts; equal digests mean equal rollouts.

    The hashed bytes are, for each row in order, the number of its tokens as a little-endian int64 and then its token
    ids as little-endian int32. The lengths keep ``[1 2] [3]`` apart from ``[1] [2 3]``. After the tokens of a
    conversation, the prompts of its branches (tpu_grpo/records/episode.py) are hashed in the same way. These
    prompts hold the text of the environment's ``reset``, and its answers where the chat template rewrites earlier
    turns.
    """
    digest = hashlib.sha256()
    for completion in completions:
        branches = () if completion.episode is None else completion.episode.branches
        for ids in (completion.token_ids, *(branch.prompt for branch in branches)):
            digest.update(np.int64(len(ids)).astype("<i8").tobytes())
            digest.update(np.asarray(ids).astype("<i4").tobytes())
    return digest.hexdigest()


def episode_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Compute ``episodes/*`` and ``turns/*``; empty if no completion is a conversation.

    Failures are given by kind, as shares of all conversations. Each of several environments also has its own metrics.
    """
    found = [(completion, completion.episode) for completion in completions if completion.episode is not None]
    if not found:
        return {}
    episodes = [episode for _, episode in found]
    turns = [turn for episode in episodes for turn in episode.turns]
    turns_E = np.array([len(episode.turns) for episode in episodes])
    seconds_E = np.array([episode.seconds for episode in episodes])
    endings = [episode.ending for episode in episodes]
    failures = [episode.failure.kind for episode in episodes if episode.failure is not None]
    values = {
        "episodes/turns_mean": float(turns_E.mean()),
        "episodes/turns_max": float(turns_E.max()),
        "episodes/calls_mean": sum(len(turn.calls) for turn in turns) / len(episodes),
        "episodes/tokens_mean": float(np.mean([one.sampled_tokens for one, _ in found])),
        "episodes/observation_tokens_mean": sum(turn.observed for turn in turns) / len(episodes),
        "episodes/branches_mean": float(np.mean([len(episode.branches) for episode in episodes])),
        "episodes/truncated_fraction": float(np.mean([ending in ("turns", "tokens") for ending in endings])),
        **{f"episodes/ended_{ending}": endings.count(ending) / len(episodes) for ending in get_args(Ending)},
        "episodes/failed_fraction": len(failures) / len(episodes),
        **{f"episodes/failed_{kind}": failures.count(kind) / len(episodes) for kind in sorted(set(failures))},
        "episodes/wait_seconds_mean": float(seconds_E.mean()),
        "episodes/wait_seconds_max": float(seconds_E.max()),
        "turns/tokens_mean": sum(turn.end - turn.start for turn in turns) / max(len(turns), 1),
        "turns/bad_calls": sum(turn.errors for turn in turns) / max(len(turns), 1),
    }
    names = sorted({episode.environment for episode in episodes})
    for name in names if len(names) > 1 else ():
        its = [episode for episode in episodes if episode.environment == name]
        rewards = [episode.reward for episode in its if episode.reward is not None]
        values[f"episodes/{name}/share"] = len(its) / len(episodes)
        values[f"episodes/{name}/turns_mean"] = sum(len(episode.turns) for episode in its) / len(its)
        values[f"episodes/{name}/failed_fraction"] = sum(episode.failure is not None for episode in its) / len(its)
        if rewards:
            values[f"episodes/{name}/reward_mean"] = sum(rewards) / len(rewards)
    return values


def _group_values(scores: Scores, size: int) -> dict[str, float]:
    if not scores.has_rewards:
        return {}
    return {"groups/zero_variance_fraction": zero_variance_fraction(scores.total.reshape(-1, size))}


def _reward_values(scores: Scores) -> dict[str, float]:
    if not scores.has_rewards:
        return {}
    totals = scores.total[scores.scored] if scores.scored.any() else scores.total
    values = {"rewards/mean": float(np.mean(totals)), "rewards/std": float(np.std(totals))}
    for name, rewards_B in scores.by_name.items():
        applies_B = ~np.isnan(rewards_B)
        if applies_B.any():
            values[f"rewards/{name}/mean"] = float(np.mean(rewards_B[applies_B]))
            values[f"rewards/{name}/std"] = float(np.std(rewards_B[applies_B]))
    values |= {name: figure.value for name, figure in scores.figures.items()}
    return values | {"rewards/seconds": float(scores.seconds)}
