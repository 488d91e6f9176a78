"""Over several hosts, each host scores some of the groups, and all end with the rewards of all rows.

A reward that computes something else on one host would go unnoticed, since nobody else scores that host's groups. So
one group of every step, the witness, is scored by all hosts, and their values are compared.
"""

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_grpo.errors import LockstepError
from tpu_grpo.hosts import Hosts
from tpu_grpo.rewards.scoring import RewardSet
from tpu_grpo.types import Figure, PromptBatch, Rollout, Scores


class DistributedRewards:
    """Score like a RewardSet, with the work split by groups: host i of N takes prompts i, i + N, ... of a step.

    A reward sees the rows of its host only, so one that compares rows with each other must do so within a group.
    """

    def __init__(self, rewards: RewardSet, hosts: Hosts, compared: Collection[str] = ()):
        self._rewards = rewards
        self._hosts = hosts
        self._compared = tuple(name for name in rewards.names if name in compared)
        """These rewards give the same value for the same text, wherever they are computed."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the rewards, as configured."""
        return self._rewards.names

    def score(self, rollout: Rollout) -> Scores:
        """Return the rewards of all B rows, the same on every host.

        Raises:
            RewardError: if a reward fails on this host.
            LockstepError: if a compared reward differs between hosts, or another host does not answer.
        """
        if self._hosts.count == 1:
            return self._rewards.score(rollout)
        start = time.perf_counter()
        prompts = len(rollout.batch.prompts)
        own_prompts = range(self._hosts.index, prompts, self._hosts.count)
        scores = self._rewards.score(select_prompts(rollout, own_prompts)) if own_prompts else None
        witness = select_prompts(rollout, range(rollout.batch.step % prompts, rollout.batch.step % prompts + 1))
        witness_values = self._rewards.repeatable_values(witness, self._compared)
        figures = {} if scores is None else encode_figures(scores.figures)
        message = json.dumps([_columns(scores, self.names), witness_values, figures]).encode()
        gathered = self._hosts.gather("rewards", message)
        columns, witnesses, host_figures = zip(*map(json.loads, gathered), strict=True)
        _compare_witness(witness, witnesses)
        total, *by_name = _interleave(columns, rollout)
        seconds = time.perf_counter() - start
        return Scores(total, dict(zip(self.names, by_name, strict=True)), seconds, merge_figures(host_figures))

    def close(self) -> None:
        """Let the rewards close and end their processes."""
        self._rewards.close()


def select_prompts(rollout: Rollout, prompts: range) -> Rollout:
    """Select the rows of some of a rollout's prompts."""
    rows = [p * rollout.group_size + g for p in prompts for g in range(rollout.group_size)]
    return replace(
        rollout,
        batch=PromptBatch(rollout.batch.step, tuple(rollout.batch.prompts[p] for p in prompts)),
        completions=tuple(rollout.completions[row] for row in rows),
        texts=tuple(rollout.texts[row] for row in rows),
    )


def _compare_witness(witness: Rollout, by_host: Sequence[Mapping[str, Sequence[float] | None]]) -> None:
    for name in by_host[0]:
        if any(values[name] is None for values in by_host):
            continue  # it had a problem somewhere, which its on_error deals with
        for row, text in enumerate(witness.texts):
            found = [repr(values[name][row]) for values in by_host]  # pyright: ignore[reportOptionalSubscript]
            if len(set(found)) > 1:
                listed = ", ".join(f"{value} on host {host}" for host, value in enumerate(found))
                raise LockstepError(
                    f"reward {name} must give the same value for the same text on every host, got {listed} for "
                    f"{text!r}; look for what differs between them (files it reads, libraries, random numbers), or set "
                    "deterministic: false for a reward that cannot repeat itself"
                )


def _columns(scores: Scores | None, names: Sequence[str]) -> list[list[Any]]:
    """List the total, then each reward; as JSON, floats survive exactly, NaN (not applicable) included."""
    if scores is None:
        return [[] for _ in range(1 + len(names))]
    return [scores.total.tolist(), *(scores.by_name[name].tolist() for name in names)]


def _interleave(columns_by_host: Sequence[Sequence[Sequence[float]]], rollout: Rollout) -> list[np.ndarray]:
    """Put the rows of all hosts into the order of the rollout: prompt p was scored by host p mod N."""
    hosts, group = len(columns_by_host), rollout.group_size
    merged = []
    for column in range(len(columns_by_host[0])):
        values_PG = np.empty((len(rollout.batch.prompts), group))
        for host, columns in enumerate(columns_by_host):
            values_PG[host::hosts] = np.asarray(columns[column], np.float64).reshape(-1, group)
        merged.append(values_PG.reshape(-1))
    return merged


# --- figures ---------------------------------------------------------------------------------------------------------


def encode_figures(figures: Mapping[str, Figure]) -> dict[str, list[Any]]:
    """Encode figures for JSON: name -> [value, how to merge, count]."""
    return {name: [figure.value, figure.merge, figure.count] for name, figure in figures.items()}


def merge_figures(by_host: Iterable[Mapping[str, list[Any]]]) -> dict[str, Figure]:
    """Merge the encoded figures of several hosts: sums add up, means are weighted by their counts, the maximum stays.

    A mean of 2 over 1 value and a mean of 5 over 2 values make a mean of 4 over 3.
    """
    merged: dict[str, Figure] = {}
    for figures in by_host:
        for name, (value, how, count) in figures.items():
            new = Figure(value, how, count)
            merged[name] = _merge_two(merged[name], new) if name in merged else new
    return merged


def _merge_two(a: Figure, b: Figure) -> Figure:
    count = a.count + b.count
    match a.merge:
        case "sum":
            return Figure(a.value + b.value, "sum", count)
        case "max":
            return Figure(max(a.value, b.value), "max", count)
        case "mean":
            return Figure((a.value * a.count + b.value * b.count) / count, "mean", count)
