"""Rewards over several hosts: each scores its share of the groups, and all end with all values."""

import json
import time
from dataclasses import replace

import numpy as np

from tpu_grpo.hosts import Hosts
from tpu_grpo.rewards.scoring import RewardSet
from tpu_grpo.types import PromptBatch, Rollout, Scores


class SharedRewards:
    """Scores like a RewardSet, with the work split by groups: host i of N takes prompts i, i + N, ... of a step.

    A reward sees the rows of its host only, so one that compares rows with each other must do so within a group.
    """

    def __init__(self, rewards: RewardSet, hosts: Hosts):
        self._rewards = rewards
        self._hosts = hosts

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards, as configured."""
        return self._rewards.names

    def score(self, rollout: Rollout) -> Scores:
        """Rewards of all B rows, the same on every host.

        Raises:
            RewardError: if a reward fails on this host.
            LockstepError: if another host does not answer.
        """
        if self._hosts.count == 1:
            return self._rewards.score(rollout)
        start = time.perf_counter()
        mine = range(self._hosts.index, len(rollout.batch.prompts), self._hosts.count)
        scores = self._rewards.score(share_of(rollout, mine)) if mine else None
        shares = self._hosts.gather("rewards", _encoded(scores, self.names))
        total, *by_name = _interleaved([json.loads(share) for share in shares], rollout)
        return Scores(total, dict(zip(self.names, by_name, strict=True)), time.perf_counter() - start)


def share_of(rollout: Rollout, prompts: range) -> Rollout:
    """The rows of some of a rollout's prompts."""
    rows = [p * rollout.group_size + g for p in prompts for g in range(rollout.group_size)]
    return replace(
        rollout,
        batch=PromptBatch(rollout.batch.step, tuple(rollout.batch.prompts[p] for p in prompts)),
        completions=tuple(rollout.completions[row] for row in rows),
        texts=tuple(rollout.texts[row] for row in rows),
    )


def _encoded(scores: Scores | None, names: tuple[str, ...]) -> bytes:
    """Total, then each reward, as JSON; floats survive exactly, NaN (not applicable) included."""
    if scores is None:
        return json.dumps([[] for _ in range(1 + len(names))]).encode()
    return json.dumps([scores.total.tolist(), *(scores.by_name[name].tolist() for name in names)]).encode()


def _interleaved(shares: list[list[list[float]]], rollout: Rollout) -> list[np.ndarray]:
    """Undo the dealing: prompt p was scored by host p mod N."""
    hosts, group = len(shares), rollout.group_size
    columns = []
    for column in range(len(shares[0])):
        values = np.empty((len(rollout.batch.prompts), group))
        for host, share in enumerate(shares):
            values[host::hosts] = np.asarray(share[column], np.float64).reshape(-1, group)
        columns.append(values.reshape(-1))
    return columns
