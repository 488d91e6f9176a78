"""Scores groups on several hosts: each host scores some of the groups, and all hosts get the rewards of all rows.

Most groups are scored by one host only, so a reward that computes wrong values on one host would go unnoticed.
Therefore all hosts score the same one group of every rollout with the deterministic rewards, and compare the values.
This group is called the witness.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from tpu_grpo.hosts import Hosts, packed, unpacked
from tpu_grpo.records.errors import LockstepError
from tpu_grpo.records.stages import Figure, PromptBatch, Rollout, Scores
from tpu_grpo.rewards.reward_call import NO_VALUES, TokenValues
from tpu_grpo.rewards.scoring import RewardSet, Scoring, check_some_scored


@dataclass(frozen=True)
class HostScores:
    """The message that a host sends to the other hosts about its rows."""

    columns: list[list[float]]
    """Lists with a value per row: the totals, then each reward's values. JSON keeps floats exact, including NaN."""
    witness: dict[str, list[float | str] | None]
    """The values of each compared reward for the rows of the witness, by name; None if the reward had a problem."""
    figures: dict[str, Figure]
    of_tokens: str
    """The weighted per-token rewards of all tokens of the host's rows, as `packed` writes them."""


class DistributedRewards:
    """Scores with a `RewardSet` on several hosts, each of which scores some of the groups (see `scorers_of`).

    A reward sees only the rows of its own host, so a reward that compares rows must compare them within a group.
    """

    def __init__(self, rewards: RewardSet, hosts: Hosts, compared: Collection[str] = ()):
        self.rewards, self.hosts = rewards, hosts
        self.compared = tuple(name for name in rewards.names if name in compared)
        """The rewards that must give the same value for the same text on every host."""

    def score(self, rollout: Rollout) -> Scores:
        """Return the rewards of all B rows of a finished rollout; see ``DistributedScoring.finish``."""
        if self.hosts.count > 1:
            with self.begin(rollout.batch) as scoring:
                return scoring.finish([rollout])[0]
        scores = self.rewards.score(rollout)
        check_some_scored(rollout, scores)
        return scores

    def begin(self, batch: PromptBatch, rollouts: int = 1) -> "DistributedScoring":
        """Begin to score rollouts of a batch's prompts, before they are sampled; use it in a ``with`` block."""
        return DistributedScoring(self, batch, rollouts)

    def close(self) -> None:
        """Close the rewards, and end their worker processes and threads."""
        self.rewards.close()


class DistributedScoring(Scoring):
    """Scores rollouts, each group on one of the hosts; groups may be added before a rollout is finished."""

    def __init__(self, distributed: DistributedRewards, batch: PromptBatch, rollouts: int) -> None:
        super().__init__(distributed.rewards, batch, rollouts)
        self._hosts, self._compared = distributed.hosts, distributed.compared
        self._own: Sequence[Scores | None] | None = None

    def score_own(self, rollouts: Sequence[Rollout]) -> None:
        """Score this host's groups without communication. If this method was not called, ``finish`` calls it. Raises
        RewardError if a reward fails on this host."""
        self._started = time.perf_counter()
        if self._hosts.count == 1:
            self._own = super().finish(rollouts)
            return
        scorers = scorers_of(rollouts[0], self._hosts.count)
        own = [prompt for prompt, host in enumerate(scorers) if host == self._hosts.index]
        self._own = super().finish(rollouts, own) if own else [None] * len(rollouts)
        self.close()

    def finish(self, rollouts: Sequence[Rollout]) -> list[Scores]:
        """Return the rewards of all B rows of every rollout, the same on every host. The rollouts have the same
        prompts.

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
        """Merge the scores of all hosts, and compare their values for the witness."""
        witness = rollout.select([rollout.batch.step % len(scorers)])
        names, token_rewards = self._rewards.names, self._rewards.token_rewards
        columns, figures, of_tokens = [np.zeros(0)] * (1 + len(names)), dict[str, Figure](), [NO_VALUES]
        if own is not None:
            columns = [own.total, *(own.by_name[name] for name in names)]
            figures, of_tokens = dict(own.figures), [NO_VALUES, *own.per_token]
        witness_values = self._rewards.repeatable_values(witness, self._compared)
        mine = HostScores([c.tolist() for c in columns], witness_values, figures, packed(np.concatenate(of_tokens)))
        rows_of = [np.repeat(np.array(scorers) == host, rollout.group_size) for host in range(self._hosts.count)]
        lengths = np.array([len(c.token_ids) if token_rewards else 0 for c in rollout.completions])

        def read(host: int, answer: HostScores) -> tuple[HostScores, Float[np.ndarray, "C b"], list[TokenValues]]:
            """Unpack a host's message into C columns; raise ValueError if it does not fit the host's b rows."""
            found = np.array(answer.columns).reshape(len(columns), rows_of[host].sum())
            seen = {name: values and len(values) for name, values in answer.witness.items()}
            if seen.keys() != mine.witness.keys() or set(seen.values()) - {None, len(witness.texts)}:
                raise ValueError(f"a witness of {len(witness.texts)} rows has {mine.witness.keys()}, got {seen}")
            if any(figure.count < 1 for figure in answer.figures.values()):
                raise ValueError("a figure is of one value at least")
            of_rows = lengths[rows_of[host]]
            return answer, found, np.split(unpacked(answer.of_tokens, of_rows.sum()), np.cumsum(of_rows))[:-1]

        answers = self._hosts.share("rewards", mine, HostScores, read)
        _compare_witness(witness, [answer.witness for answer, _, _ in answers])
        merged, per_token = np.empty((len(columns), len(lengths))), [NO_VALUES] * len(lengths)
        for rows, (_, found, tokens) in zip(rows_of, answers, strict=True):
            merged[:, rows] = found
            for row, values in zip(np.flatnonzero(rows), tokens, strict=True):
                per_token[row] = values
        total, *by_name = merged
        return Scores(
            total,
            dict(zip(names, by_name, strict=True)),
            time.perf_counter() - start,
            merge_figures(answer.figures for answer, _, _ in answers),
            tuple(per_token) if token_rewards else (),
            token_rewards,
        )


def scorers_of(rollout: Rollout, hosts: int) -> list[int]:
    """Return each prompt's scoring host, as ``Rollout.scoring_hosts`` says: the one that got its completions."""
    return list(rollout.scoring_hosts) or [prompt % hosts for prompt in range(len(rollout.batch.prompts))]


def _compare_witness(witness: Rollout, by_host: Sequence[Mapping[str, Sequence[Any] | None]]) -> None:
    for name in by_host[0]:
        if any(values[name] is None for values in by_host):
            continue  # the reward had a problem on some host, which on_error handles
        for row, text in enumerate(witness.texts):
            found = [repr(values[name][row]) for values in by_host]  # pyrefly: ignore[unsupported-operation]
            if len(set(found)) > 1:
                listed = ", ".join(f"{value} on host {host}" for host, value in enumerate(found))
                raise LockstepError(
                    f"reward {name} must give the same value for the same text on every host, got {listed} for "
                    f"{text!r}; look for what differs between them (files it reads, libraries, random numbers), or set "
                    "deterministic: false for a reward that cannot repeat itself"
                )


def merge_figures(by_host: Iterable[Mapping[str, Figure]]) -> dict[str, Figure]:
    """Merge the figures of several hosts."""
    merged: dict[str, Figure] = {}
    for figures in by_host:
        for name, figure in figures.items():
            merged[name] = merged[name].merged(figure) if name in merged else figure
    return merged
