"""Over several hosts, each host scores some of the groups, and all end with the rewards of all rows.

A reward that computes something else on one host would go unnoticed, since nobody else scores that host's groups. So
one group of every step, the witness, is scored by all hosts, and their values are compared.
"""

import base64
import json
import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from tpu_grpo.hosts import Hosts
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.records.stages import Completion, Figure, PromptBatch, Rollout, Scores
from tpu_grpo.rewards.calling import NO_VALUES, TokenValues
from tpu_grpo.rewards.scoring import RewardSet, check_some_scored


class DistributedRewards:
    """Score like a RewardSet, with the work split by groups: a rollout says which host scores which prompts.

    A reward sees the rows of its host only, so one that compares rows with each other must do so within a group.
    """

    def __init__(self, rewards: RewardSet, hosts: Hosts, compared: Collection[str] = ()):
        self.rewards = rewards
        self._hosts = hosts
        self._compared = tuple(name for name in rewards.names if name in compared)
        """These rewards give the same value for the same text, wherever they are computed."""

    def score(self, rollout: Rollout) -> Scores:
        """Return the rewards of all B rows of a rollout that is there; see ``DistributedScoring.finish``."""
        if self._hosts.count > 1:
            with self.begin(rollout.batch) as scoring:
                return scoring.finish([rollout])[0]
        scores = self.rewards.score(rollout)
        check_some_scored(rollout, scores)
        return scores

    def begin(self, batch: PromptBatch, rollouts: int = 1) -> "DistributedScoring":
        """Begin to score rollouts of a batch's prompts, before they are sampled; use it in a ``with`` block."""
        return DistributedScoring(self.rewards, self._hosts, self._compared, batch, rollouts)

    def close(self) -> None:
        """Let the rewards close and end their processes."""
        self.rewards.close()


class DistributedScoring:
    """Scores rollouts whose groups it may be told of before the rollouts are there: each on the host that scores it."""

    def __init__(
        self, rewards: RewardSet, hosts: Hosts, compared: Sequence[str], batch: PromptBatch, rollouts: int
    ) -> None:
        self._rewards = rewards
        self._hosts = hosts
        self._compared = compared
        self._scoring = rewards.begin(batch, rollouts)
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
        columns: list[list[Any]] = [[] for _ in range(2 + len(names))]  # as JSON, floats survive exactly, NaN included
        if own is not None:
            values = [own.by_name[name].tolist() for name in names]
            columns = [own.total.tolist(), (~own.scored).tolist(), *values]
        message = json.dumps([columns, witness_values, figures, of_tokens]).encode()
        answers = map(json.loads, self._hosts.gather("rewards", message))
        by_host, witnesses, host_figures, texts = zip(*answers, strict=True)
        _compare_witness(witness, witnesses)
        total, unscored, *by_name = _interleave(by_host, rollout, scorers)
        token_rewards, lengths = self._rewards.token_rewards, [len(c.token_ids) for c in rollout.completions]
        hosts = np.repeat(scorers, rollout.group_size).tolist()
        return Scores(
            total,
            dict(zip(names, by_name, strict=True)),
            time.perf_counter() - start,
            merge_figures(host_figures),
            unpacked(dict(enumerate(texts)), lengths, hosts) if token_rewards else (),
            token_rewards,
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


def packed(per_token: Sequence[TokenValues]) -> str:
    """Pack the numbers of all tokens, exactly, as a short text: most are often 0."""
    joined = np.concatenate([*per_token, NO_VALUES]).astype("<f8")
    return base64.b64encode(zlib.compress(joined.tobytes(), level=1)).decode()


def unpacked(texts: Mapping[int, str], lengths: Sequence[int], hosts: Sequence[int]) -> tuple[TokenValues, ...]:
    """Put together what each host packed; completions have these ``lengths``, and these ``hosts`` scored them."""
    numbers = {host: np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8") for host, text in texts.items()}
    taken, found = dict.fromkeys(numbers, 0), []
    for length, host in zip(lengths, hosts, strict=True):
        start = taken[host]
        taken[host] += length
        found.append(numbers[host][start : start + length].astype(np.float64))
    return tuple(found)


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
