"""Dynamic sampling (DAPO): a step samples batches of prompts, called rounds, until enough groups are informative.

    rounds = Rounds(wanted=2)
    rounds.add(scored, informative_P)       # repeated until rounds.enough, at most as often as the config allows
    groups = rounds.groups()

A group, the completions of one prompt, is informative if its rewards differ (tpu_grpo/learner/signal.py). For
P = 2 wanted groups and rounds of three prompts, with + for an informative group:

    - + -              too few: another round is sampled
    - + -   + - +      groups 2 and 4 are learnt from; the next step begins with prompt 5
    - + -   - - -      without a third round: group 2, and group 1 with weight 0; all six prompts are used up

Groups are chosen in the order of the prompts, not in the order in which they finish. Uninformative groups get weight 0
in the learner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
from jaxtyping import Bool

from tpu_grpo.records.stages import PromptBatch, Rollout, ScoredRollout, Scores

SUMS = (
    "rollout/wait_seconds",
    "rollout/prefills",
    "rollout/retracted",
    "rollout/environment_wait_seconds",
    "rollout/served_turns",
)
"""The figures of a rollout that are summed over rounds; all other figures are shares and means, which are averaged."""


@dataclass(frozen=True)
class StepGroups:
    """The groups that a step sampled, and which of them it learns from."""

    sampled: ScoredRollout
    """All sampled groups, round after round."""
    chosen: tuple[int, ...]
    """The numbers of the P groups for the learner, ascending."""
    needed: int
    """The number of leading groups whose prompts are used up; the next step samples the later prompts again."""
    informative: int
    """The number of informative groups among all sampled ones."""
    rounds: int

    @cached_property
    def learnt(self) -> ScoredRollout:
        """The groups for the learner."""
        return self._select(self.chosen)

    @cached_property
    def used(self) -> ScoredRollout:
        """The first ``needed`` groups, whose prompts are used up."""
        return self._select(range(self.needed))

    def _select(self, numbers: Sequence[int]) -> ScoredRollout:
        return self.sampled if len(numbers) == len(self.sampled.rollout.batch.prompts) else self.sampled.select(numbers)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of dynamic sampling: groups sampled, rounds, and chosen groups of weight 0."""
        return {
            "groups/sampled": len(self.sampled.rollout.batch.prompts),
            "groups/rounds": self.rounds,
            "groups/padded": max(0, len(self.chosen) - self.informative),
        }


class Rounds:
    """Collects rounds until ``wanted`` groups are informative."""

    def __init__(self, wanted: int):
        self._wanted = wanted
        self._rounds: list[ScoredRollout] = []
        self._informative_N: Bool[np.ndarray, " N"] = np.zeros(0, np.bool_)

    def add(self, scored: ScoredRollout, informative: Bool[np.ndarray, " N"]) -> None:
        """Add a round, and whether each of its N groups is informative."""
        self._rounds.append(scored)
        self._informative_N = np.concatenate([self._informative_N, informative])

    @property
    def last(self) -> PromptBatch | None:
        """The prompts of the last round, if there was one."""
        return self._rounds[-1].rollout.batch if self._rounds else None

    @property
    def enough(self) -> bool:
        """Whether at least ``wanted`` groups are informative."""
        return self._informative_N.sum() >= self._wanted

    def groups(self) -> StepGroups:
        """Choose the first ``wanted`` informative groups; if there are too few, add the first other groups."""
        informative = self._informative_N
        found = np.flatnonzero(informative)[: self._wanted]
        others = np.flatnonzero(~informative)[: self._wanted - len(found)]
        chosen = np.sort(np.concatenate([found, others])).tolist()
        needed = chosen[-1] + 1 if self.enough else len(informative)
        return StepGroups(join(self._rounds), tuple(chosen), needed, int(informative.sum()), len(self._rounds))


def join(rounds: Sequence[ScoredRollout]) -> ScoredRollout:
    """Concatenate the rounds of a step; a single round is returned unchanged."""
    if len(rounds) == 1:
        return rounds[0]
    rollouts, scores = [each.rollout for each in rounds], [each.scores for each in rounds]
    batches = [rollout.batch for rollout in rollouts]
    figures = dict(scores[0].figures)
    for later in scores[1:]:
        figures |= {name: figures[name].merged(new) if name in figures else new for name, new in later.figures.items()}
    rollout = Rollout(
        batch=replace(
            batches[0],
            prompts=tuple(chain.from_iterable(batch.prompts for batch in batches)),
            records=tuple(chain.from_iterable(batch.records for batch in batches)),
            positions=tuple(chain.from_iterable(batch.positions for batch in batches)),
        ),
        group_size=rollouts[0].group_size,
        completions=tuple(chain.from_iterable(rollout.completions for rollout in rollouts)),
        texts=tuple(chain.from_iterable(rollout.texts for rollout in rollouts)),
        seconds=sum(rollout.seconds for rollout in rollouts),
        figures=_joined_figures(rollouts),
        scoring_hosts=tuple(chain.from_iterable(rollout.scoring_hosts for rollout in rollouts)),
    )
    joined = Scores(
        total=np.concatenate([each.total for each in scores]),
        by_name={name: np.concatenate([each.by_name[name] for each in scores]) for name in scores[0].by_name},
        seconds=sum(each.seconds for each in scores),
        figures=figures,
        per_token=tuple(chain.from_iterable(each.per_token for each in scores)),
        token_rewards=scores[0].token_rewards,
    )
    return ScoredRollout(rollout, joined)


def _joined_figures(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Sum the figures in SUMS over rounds, and average all other figures, weighted by the seconds of each round."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.figures):
        having = [rollout for rollout in rollouts if name in rollout.figures]
        if name in SUMS:
            joined[name] = sum(rollout.figures[name] for rollout in having)
        else:
            weighed = sum(rollout.seconds * rollout.figures[name] for rollout in having)
            joined[name] = weighed / (sum(rollout.seconds for rollout in having) or 1.0)
    return joined
