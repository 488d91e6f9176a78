"""Over several hosts, each host scores some of the groups, and all end with the rewards of all rows.

A reward that computes something else on one host would go unnoticed, since nobody else scores that host's groups. So
one group of every step, the witness, is scored by all hosts, and their values are compared.
"""

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.records.stages import Completion, Figure, PromptBatch, Rollout, Scores
from tpu_grpo.rewards.scoring import RewardSet, Scoring
from tpu_grpo.rewards.tokens import TokenValues, packed, unpacked
from tpu_grpo.rewards.totals import check_some_scored


class DistributedRewards:
    """Score like a RewardSet, with the work split by groups: a rollout says which host scores which prompts.

    A reward sees the rows of its host only, so one that compares rows with each other must do so within a group.
    """

    def __init__(self, rewards: RewardSet, hosts: Hosts, compared: Collection[str] = ()):
        self.rewards = self._rewards = rewards
        self._hosts = hosts
        self._compared = tuple(name for name in rewards.names if name in compared)
        """These rewards give the same value for the same text, wherever they are computed."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the rewards, as configured."""
        return self._rewards.names

    def score(self, rollout: Rollout) -> Scores:
        """Return the rewards of all B rows of a rollout that is there; see ``DistributedScoring.finish``."""
        if self._hosts.count > 1:
            with self.begin(rollout.batch) as scoring:
                return scoring.finish([rollout])[0]
        scores = self._rewards.score(rollout)
        check_some_scored(rollout, scores)
        return scores

    def begin(self, batch: PromptBatch, rollouts: int = 1) -> "DistributedScoring":
        """Begin to score rollouts of a batch's prompts, before they are sampled; use it in a ``with`` block."""
        return DistributedScoring(self._rewards, self._hosts, self._compared, batch, rollouts)

    def close(self) -> None:
        """Let the rewards close and end their processes."""
        self._rewards.close()


class DistributedScoring:
    """Scores rollouts whose groups it may be told of before the rollouts are there: each on the host that scores it."""

    def __init__(
        self, rewards: RewardSet, hosts: Hosts, compared: Sequence[str], batch: PromptBatch, rollouts: int
    ) -> None:
        self._rewards = rewards
        self._hosts = hosts
        self._compared = compared
        self._scoring: Scoring = rewards.begin(batch, rollouts)
        self._own: Sequence[Scores | None] | None = None

    def add(self, prompt: int, completions: Sequence[Completion], texts: Sequence[str], rollout: int = 0) -> None:
        """Have the group of a prompt scored as soon as this host's rewards find time; see ``Scoring.add``."""
        self._scoring.add(prompt, completions, texts, rollout)

    def score_own(self, rollouts: Sequence[Rollout]) -> None:
        """Score this host's groups, without a word to the other hosts; ``finish`` does so too, if this was not called.

        Raises:
            RewardError: if a reward fails on this host.
        """
        self._started = time.perf_counter()
        if self._hosts.count == 1:
            self._own = self._scoring.finish(rollouts)
            return
        scorers = scorers_of(rollouts[0], self._hosts.count)
        own = [prompt for prompt, host in enumerate(scorers) if host == self._hosts.index]
        self._own = self._scoring.finish(rollouts, own) if own else [None] * len(rollouts)
        self._scoring.close()

    def finish(self, rollouts: Sequence[Rollout]) -> list[Scores]:
        """Return the rewards of all B rows of every rollout, the same on every host. Their prompts are the same.

        Raises:
            RewardError: if a reward fails on this host; or on all hosts, if no reward applies to any row.
            LockstepError: if a compared reward differs between hosts, or another host does not answer.
        """
        if self._own is None:
            self.score_own(rollouts)
        assert self._own is not None
        scorers, start, found = scorers_of(rollouts[0], self._hosts.count), self._started, []
        for rollout, scores in zip(rollouts, self._own, strict=True):
            alone = scores if self._hosts.count == 1 else None
            found.append(alone or self._gathered(rollout, scores, scorers, start))
            check_some_scored(rollout, found[-1])
            start = time.perf_counter()
        return found

    def _gathered(self, rollout: Rollout, own: Scores | None, scorers: Sequence[int], start: float) -> Scores:
        """Put the scores of all hosts together, and compare those of the witness."""
        witness = rollout.select([rollout.batch.step % len(scorers)])
        witness_values = self._rewards.repeatable_values(witness, self._compared)
        names = self._rewards.names
        figures = {} if own is None else encode_figures(own.figures)
        of_tokens = packed(() if own is None else own.per_token)
        message = json.dumps([_columns(own, names), witness_values, figures, of_tokens]).encode()
        answers = map(json.loads, self._hosts.gather("rewards", message))
        columns, witnesses, host_figures, texts = zip(*answers, strict=True)
        _compare_witness(witness, witnesses)
        total, unscored, *by_name = _interleave(columns, rollout, scorers)
        seconds = time.perf_counter() - start
        return Scores(
            total,
            dict(zip(names, by_name, strict=True)),
            seconds,
            merge_figures(host_figures),
            _of_tokens(texts, rollout, scorers) if self._rewards.token_rewards else (),
            self._rewards.token_rewards,
            unscored.astype(bool),
        )

    def close(self) -> None:
        """Give up what is not scored yet."""
        self._scoring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def scorers_of(rollout: Rollout, hosts: int) -> list[int]:
    """Return the host that scores each prompt: the one that was told of its group, or else hosts in turn."""
    return list(rollout.told) or [prompt % hosts for prompt in range(len(rollout.batch.prompts))]


def _compare_witness(witness: Rollout, by_host: Sequence[Mapping[str, Sequence[Any] | None]]) -> None:
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
    """List the total, whether it is not the row's own, then each reward.

    As JSON, floats survive exactly, NaN (not applicable) included.
    """
    if scores is None:
        return [[] for _ in range(2 + len(names))]
    return [scores.total.tolist(), (~scores.scored).tolist(), *(scores.by_name[name].tolist() for name in names)]


def _interleave(
    columns_by_host: Sequence[Sequence[Sequence[float]]], rollout: Rollout, scorers: Sequence[int]
) -> list[np.ndarray]:
    """Put the rows of all hosts into the order of the rollout."""
    merged = []
    for column in range(len(columns_by_host[0])):
        values_PG = np.empty((len(scorers), rollout.group_size))
        for host, columns in enumerate(columns_by_host):
            values_PG[np.array(scorers) == host] = np.reshape(columns[column], (-1, rollout.group_size))
        merged.append(values_PG.reshape(-1))
    return merged


def _of_tokens(texts: Sequence[str], rollout: Rollout, scorers: Sequence[int]) -> tuple[TokenValues, ...]:
    """Put what the hosts' rewards of single tokens gave into the order of the rollout."""
    lengths = [len(completion.token_ids) for completion in rollout.completions]
    return unpacked(dict(enumerate(texts)), lengths, np.repeat(scorers, rollout.group_size).tolist())


# --- figures ---------------------------------------------------------------------------------------------------------


def encode_figures(figures: Mapping[str, Figure]) -> dict[str, list[Any]]:
    """Encode figures for JSON: name -> [value, how to merge, count]."""
    return {name: [figure.value, figure.merge, figure.count] for name, figure in figures.items()}


def merge_figures(by_host: Iterable[Mapping[str, list[Any]]]) -> dict[str, Figure]:
    """Merge the encoded figures of several hosts."""
    merged: dict[str, Figure] = {}
    for figures in by_host:
        for name, (value, how, count) in figures.items():
            new = Figure(value, how, count)
            merged[name] = merged[name].merged(new) if name in merged else new
    return merged
