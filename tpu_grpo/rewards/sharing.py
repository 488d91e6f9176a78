"""Rewards over several hosts: each scores its share of the groups, and all end with all values.

A reward that computes something else on one host would go unnoticed, since nobody else scores that host's share. So
one group of every step, the witness, is scored by all hosts, and their values are compared.
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_grpo.errors import LockstepError
from tpu_grpo.hosts import Hosts
from tpu_grpo.rewards.figures import encode_figures, merge_figures
from tpu_grpo.rewards.scoring import RewardSet
from tpu_grpo.types import PromptBatch, Rollout, Scores


class DistributedRewards:
    """Scores like a RewardSet, with the work split by groups: host i of N takes prompts i, i + N, ... of a step.

    A reward sees the rows of its host only, so one that compares rows with each other must do so within a group.
    """

    def __init__(self, rewards: RewardSet, hosts: Hosts, compared: Collection[str] = ()):
        self._rewards = rewards
        self._hosts = hosts
        self._compared = tuple(name for name in rewards.names if name in compared)
        """Rewards that give the same value for the same text, wherever they are computed."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards, as configured."""
        return self._rewards.names

    def score(self, rollout: Rollout) -> Scores:
        """Rewards of all B rows, the same on every host.

        Raises:
            RewardError: if a reward fails on this host.
            LockstepError: if a compared reward differs between hosts, or another host does not answer.
        """
        if self._hosts.count == 1:
            return self._rewards.score(rollout)
        start = time.perf_counter()
        prompts = len(rollout.batch.prompts)
        mine = range(self._hosts.index, prompts, self._hosts.count)
        scores = self._rewards.score(share_of(rollout, mine)) if mine else None
        witness = share_of(rollout, range(rollout.batch.step % prompts, rollout.batch.step % prompts + 1))
        seen = self._rewards.repeatable_values(witness, self._compared)
        figures = {} if scores is None else encode_figures(scores.figures)
        mine = json.dumps([_columns(scores, self.names), seen, figures]).encode()
        columns, witnesses, merged = zip(*map(json.loads, self._hosts.gather("rewards", mine)), strict=True)
        _compare_witness(witness, witnesses)
        total, *by_name = _interleaved(columns, rollout)
        seconds = time.perf_counter() - start
        return Scores(total, dict(zip(self.names, by_name, strict=True)), seconds, merge_figures(merged))

    def close(self) -> None:
        """Let the rewards close and end their processes."""
        self._rewards.close()


def _compare_witness(witness: Rollout, by_host: Sequence[Mapping[str, Sequence[float] | None]]) -> None:
    for name in by_host[0]:
        if any(seen[name] is None for seen in by_host):
            continue  # it had a problem somewhere, which its on_error deals with
        for row, text in enumerate(witness.texts):
            values = [repr(seen[name][row]) for seen in by_host]  # pyright: ignore[reportOptionalSubscript]
            if len(set(values)) > 1:
                listed = ", ".join(f"{value} on host {host}" for host, value in enumerate(values))
                raise LockstepError(
                    f"reward {name} must give the same value for the same text on every host, got {listed} for "
                    f"{text!r}; look for what differs between them (files it reads, libraries, random numbers), or set "
                    "deterministic: false for a reward that cannot repeat itself"
                )


def share_of(rollout: Rollout, prompts: range) -> Rollout:
    """The rows of some of a rollout's prompts."""
    rows = [p * rollout.group_size + g for p in prompts for g in range(rollout.group_size)]
    return replace(
        rollout,
        batch=PromptBatch(rollout.batch.step, tuple(rollout.batch.prompts[p] for p in prompts)),
        completions=tuple(rollout.completions[row] for row in rows),
        texts=tuple(rollout.texts[row] for row in rows),
    )


def _columns(scores: Scores | None, names: Sequence[str]) -> list[list[Any]]:
    """Total, then each reward; as JSON floats survive exactly, NaN (not applicable) included."""
    if scores is None:
        return [[] for _ in range(1 + len(names))]
    return [scores.total.tolist(), *(scores.by_name[name].tolist() for name in names)]


def _interleaved(shares: Sequence[Sequence[Sequence[float]]], rollout: Rollout) -> list[np.ndarray]:
    """Undo the dealing: prompt p was scored by host p mod N."""
    hosts, group = len(shares), rollout.group_size
    columns = []
    for column in range(len(shares[0])):
        values = np.empty((len(rollout.batch.prompts), group))
        for host, share in enumerate(shares):
            values[host::hosts] = np.asarray(share[column], np.float64).reshape(-1, group)
        columns.append(values.reshape(-1))
    return columns
