"""A step samples rounds of prompts until enough of their groups can be learnt from: dynamic sampling (DAPO).

    rounds = Rounds(wanted=2)
    rounds.add(scored, informative_P)       # and again, until rounds.enough, or as often as the config allows
    groups = rounds.groups()

For P = 2 and rounds of three prompts, of whose groups + can be learnt from and - cannot:

    - + -              too few: another round
    - + -   + - +      learnt are the second and the fourth; the next step begins with the fifth prompt
    - + -   - - -      if there is no third round, the second, and the first with weight 0; all six are used up

Which groups are learnt from follows from the order of the prompts, never from which was complete first. The learner
always gets P groups; those that cannot be learnt from have weight 0 there (see learner/signal.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool

from tpu_grpo.records.stages import Figure, PromptBatch, Rollout, ScoredRollout, Scores

SUMS = (
    "rollout/wait_seconds",
    "rollout/prefills",
    "rollout/retracted",
    "rollout/environment_wait_seconds",
    "rollout/served_turns",
)
"""The figures of a rollout that add up over rounds; the others are shares and means."""


@dataclass(frozen=True)
class StepGroups:
    """The groups that a step sampled, and which of them it learns from."""

    sampled: ScoredRollout
    """All of them, round after round."""
    chosen: tuple[int, ...]
    """The numbers of the P groups for the learner, ascending."""
    needed: int
    """How many there are up to the last that was needed; what follows them is drawn again by the next step."""
    informative: int
    """How many of all can be learnt from."""
    rounds: int

    @cached_property
    def learnt(self) -> ScoredRollout:
        """The groups for the learner."""
        return self._select(self.chosen)

    @cached_property
    def used(self) -> ScoredRollout:
        """The groups up to the last that was needed."""
        return self._select(range(self.needed))

    def _select(self, numbers: Sequence[int]) -> ScoredRollout:
        return self.sampled if len(numbers) == len(self.sampled.rollout.batch.prompts) else self.sampled.select(numbers)

    def metrics(self) -> dict[str, float]:
        """Measure what dynamic sampling did: groups sampled, rounds, and groups of weight 0 that fill the step."""
        return {
            "groups/sampled": len(self.sampled.rollout.batch.prompts),
            "groups/rounds": self.rounds,
            "groups/filled": max(0, len(self.chosen) - self.informative),
        }


class Rounds:
    """Collects the rounds of a step that wants so many groups to learn from."""

    def __init__(self, wanted: int):
        self._wanted = wanted
        self._rounds: list[ScoredRollout] = []
        self._informative: list[Bool[np.ndarray, " N"]] = []

    def add(self, scored: ScoredRollout, informative: Bool[np.ndarray, " N"]) -> None:
        """Take in a round, and which of its N groups can be learnt from."""
        self._rounds.append(scored)
        self._informative.append(informative)

    @property
    def last(self) -> PromptBatch | None:
        """The prompts of the last round, if there was one."""
        return self._rounds[-1].rollout.batch if self._rounds else None

    @property
    def enough(self) -> bool:
        """Whether as many groups as are wanted can be learnt from."""
        return sum(int(each.sum()) for each in self._informative) >= self._wanted

    def groups(self) -> StepGroups:
        """Choose the groups of the step: the first that can be learnt from, and if these are few the first others."""
        informative = np.concatenate(self._informative)
        found = np.flatnonzero(informative)[: self._wanted]
        others = np.flatnonzero(~informative)[: self._wanted - len(found)]
        chosen = np.sort(np.concatenate([found, others])).tolist()
        needed = chosen[-1] + 1 if self.enough else len(informative)
        return StepGroups(join(self._rounds), tuple(chosen), needed, int(informative.sum()), len(self._rounds))


def join(rounds: Sequence[ScoredRollout]) -> ScoredRollout:
    """Put the rounds of a step together, one after the other; a single one stays as it is."""
    if len(rounds) == 1:
        return rounds[0]
    rollouts, scores, first = [each.rollout for each in rounds], [each.scores for each in rounds], rounds[0].rollout
    batch = replace(
        first.batch,
        prompts=tuple(prompt for rollout in rollouts for prompt in rollout.batch.prompts),
        records=tuple(record for rollout in rollouts for record in rollout.batch.records),
        positions=tuple(position for rollout in rollouts for position in rollout.batch.positions),
    )
    rollout = Rollout(
        batch,
        first.group_size,
        tuple(completion for rollout in rollouts for completion in rollout.completions),
        tuple(text for rollout in rollouts for text in rollout.texts),
        sum(rollout.seconds for rollout in rollouts),
        _joined_rollout_figures(rollouts),
        tuple(host for rollout in rollouts for host in rollout.told),
    )
    total = np.concatenate([each.total for each in scores])
    by_name = {name: np.concatenate([each.by_name[name] for each in scores]) for name in scores[0].by_name}
    per_token = tuple(values for each in scores for values in each.per_token)
    seconds = sum(each.seconds for each in scores)
    names = scores[0].token_rewards
    unscored = np.concatenate([~each.scored for each in scores])
    return ScoredRollout(rollout, Scores(total, by_name, seconds, _joined_figures(scores), per_token, names, unscored))


def _joined_rollout_figures(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Add up, or take the mean over rounds by their seconds."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.figures):
        having = [rollout for rollout in rollouts if name in rollout.figures]
        weights = [1.0 if name in SUMS else rollout.seconds for rollout in having]
        value = sum(weight * rollout.figures[name] for weight, rollout in zip(weights, having, strict=True))
        joined[name] = value if name in SUMS else value / (sum(weights) or 1.0)
    return joined


def _joined_figures(scores: Sequence[Scores]) -> Mapping[str, Figure]:
    joined = dict(scores[0].figures)
    for later in scores[1:]:
        joined |= {name: joined[name].merged(new) if name in joined else new for name, new in later.figures.items()}
    return joined
