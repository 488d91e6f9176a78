"""What is measured of conversations with environments, under the names of docs/metrics.md.

Suffix: E the completions that are conversations. A mean over turns is over all turns of all conversations.
"""

from collections.abc import Sequence
from typing import get_args

import numpy as np

from tpu_grpo.records.episode import Ending, Episode
from tpu_grpo.records.stages import Completion


def episode_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Compute ``episodes/*`` and ``turns/*``; nothing where no completion is a conversation.

    How environments failed is told by the kinds of failure that there are, and of several environments by their names.
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
    return {
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
        **_by_environment(episodes),
    }


def _by_environment(episodes: Sequence[Episode]) -> dict[str, float]:
    """Compute ``episodes/<environment>/*`` where there are several environments."""
    names = sorted({episode.environment for episode in episodes})
    if len(names) == 1:
        return {}
    found: dict[str, float] = {}
    for name in names:
        its = [episode for episode in episodes if episode.environment == name]
        rewards = [episode.reward for episode in its if episode.reward is not None]
        found[f"episodes/{name}/share"] = len(its) / len(episodes)
        found[f"episodes/{name}/turns_mean"] = sum(len(episode.turns) for episode in its) / len(its)
        found[f"episodes/{name}/failed_fraction"] = sum(episode.failure is not None for episode in its) / len(its)
        if rewards:
            found[f"episodes/{name}/reward_mean"] = sum(rewards) / len(rewards)
    return found
