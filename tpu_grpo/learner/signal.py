"""The learning signal of a scored rollout, as one record: which groups and completions count, and the advantages of
their tokens.

    rewards of a group      [1 1 1 1]   uninformative: no completion is better than another
                            [0 1 0 0]   informative
                            [1 0 | |]   informative; | was cut at a length limit, and does not count with
                                        algorithm.truncated=mask
                            [1 1 0 x]   informative; the environment of x failed, and x does not count with
                                        environment.on_error=skip

The advantage of a token is its completion's advantage, plus terms for the single token:

    advantages_B    [ 0.5          -0.5    ]      of two completions, from their total rewards
    added           [[0 0.25 -1]   [0 0.5] ]      token rewards (`Scores.per_token`) and `turn_credits`
    their sum       [[0.5 0.75 -0.5]  [-0.5 0]]

A group is also informative if a sampled token has a term other than 0. Terms of tokens that an environment wrote are
ignored, see rows.py.

Suffixes: P prompts, G completions of each, B = P*G rows, T tokens of a completion, N rewards of the config.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.algorithms import RunAlgorithm
from tpu_grpo.config import EnvironmentSection, RewardSpec
from tpu_grpo.learner.rows import sampled_mask
from tpu_grpo.records.errors import NonFiniteError, RewardError
from tpu_grpo.records.stages import Completion, Rollout, ScoredRollout, differ

TokenValues = tuple[Float[np.ndarray, "_"], ...]
"""For each row, one number per token of its completion; empty if there is nothing to add."""


@dataclass(frozen=True)
class Signal:
    """The learning signal of the B rows of an update; each ``group_size`` consecutive rows belong to one prompt."""

    step: int
    group_size: int
    prompts: tuple[Sequence[int], ...]
    completions: tuple[Completion, ...]
    advantages_B: Float[np.ndarray, " B"]
    """The advantages of whole completions; 0 for unscored rows."""
    added: TokenValues
    """The terms that are added to the advantage of each token."""
    counted_B: Bool[np.ndarray, " B"]
    """Which completions count in the loss."""
    informative_P: Bool[np.ndarray, " P"]
    masked_B: Bool[np.ndarray, " B"] | None = None
    """Which completions were cut and are left out of the loss; None unless algorithm.truncated=mask."""
    from_rewards: bool = True
    """Whether rewards give the advantages; otherwise no group is informative."""

    @property
    def advantages(self) -> Float[np.ndarray, " B"] | TokenValues:
        """The advantage of each completion, or of each token if some tokens have terms of their own."""
        return self.token_advantages if self.added else self.advantages_B

    @property
    def token_advantages(self) -> TokenValues:
        """The advantage of each token."""
        if self.added:
            return tuple(advantage + values for advantage, values in zip(self.advantages_B, self.added, strict=True))
        sizes = [len(completion.token_ids) for completion in self.completions]
        return tuple(np.full(size, advantage) for advantage, size in zip(self.advantages_B, sizes, strict=True))

    def mini_batches(self, size: int, seed: int, iteration: int) -> Iterator[tuple["Signal", list[int]]]:
        """Shuffle the prompts, and yield for each mini-batch of ``size`` prompts its signal and its rows' indices.

        Every iteration over a step draws a new order from run.seed, step and iteration, the same on every host, and
        cuts it into mini-batches of equal size (PPO, Schulman et al. 2017, arXiv 1707.06347, algorithm 1). ``size``
        must divide the number of prompts. For 4 prompts and size 2:

            iteration 1    [2 0] [3 1]
            iteration 2    [1 2] [0 3]

        The completions of a prompt stay together. A mini-batch without a sampled token is left out.
        """
        prompts, group = len(self.informative_P), self.group_size
        order = np.random.default_rng([seed, self.step, iteration]).permutation(prompts).tolist()
        for start in range(0, prompts, size):
            chosen = order[start : start + size]
            rows = [prompt * group + number for prompt in chosen for number in range(group)]
            if any(self.completions[row].sampled_tokens for row in rows):
                yield self._select(chosen, rows), rows

    def _select(self, chosen: list[int], rows: list[int]) -> "Signal":
        return replace(
            self,
            prompts=tuple(self.prompts[row] for row in rows),
            completions=tuple(self.completions[row] for row in rows),
            advantages_B=self.advantages_B[rows],
            added=tuple(self.added[row] for row in rows) if self.added else (),
            counted_B=self.counted_B[rows],
            informative_P=self.informative_P[chosen],
            masked_B=None if self.masked_B is None else self.masked_B[rows],
        )

    def metrics(self) -> dict[str, float]:
        """Return the share of informative groups (unless only teachers teach) and, with algorithm.truncated=mask, of
        masked completions."""
        masked = {} if self.masked_B is None else {"completions/masked_fraction": float(self.masked_B.mean())}
        groups = {"groups/informative_fraction": float(self.informative_P.mean())} if self.from_rewards else {}
        return groups | masked


def read_signal(
    scored: ScoredRollout,
    algorithm: RunAlgorithm,
    rewards: Sequence[RewardSpec],
    environment: EnvironmentSection,
    *,
    masks_truncated: bool,
    drops_uninformative: bool,
    from_rewards: bool = True,
) -> Signal:
    """Make the signal of a rollout of any number of prompts.

    A group is informative if at least one of its completions counts, and either its rewards differ or a sampled token
    has a term other than 0. The rewards compared are the totals. If the advantages request single rewards (see
    `ON_REQUEST` in tpu_grpo/algorithms/algorithm.py), each reward with a weight other than 0 is compared instead.

    Unscored rows, whose advantage is 0, are left out of all means and standard deviations of rewards. With
    ``drops_uninformative``, so are uninformative groups. With ``masks_truncated``, truncated completions do not count.
    Unless ``from_rewards``, the advantages are those of an algorithm without rewards, and tokens have no terms.

    Raises:
        RewardError: for missing rewards, or rewards that the advantages cannot take.
        RewardError, NonFiniteError: for values of tokens or turns that are missing or not finite; names the row.
        NonFiniteError: for an advantage that is not finite.
    """
    rollout, scores, size = scored.rollout, scored.scores, scored.rollout.group_size
    completions = rollout.completions
    if len(scores.total) != len(completions):
        raise RewardError(
            f"every completion needs a reward, got {len(scores.total)} for {len(completions)}; score them all"
        )
    asked, skips = _asked(scored, rewards, algorithm), environment.on_error == "skip"
    episodes = [completion.episode for completion in completions]
    skipped_B = np.array([skips and e is not None and e.failure is not None for e in episodes], np.bool_)
    parts = [part for part in (_scored_tokens(scored), turn_credits(rollout, environment, skipped_B)) if part]
    parts = parts if from_rewards else []
    added: TokenValues = tuple(sum(values) for values in zip(*parts, strict=True))  # pyrefly: ignore[bad-assignment]
    counted_B, masked_B = ~skipped_B, None
    if masks_truncated:  # cut at rollout.max_new_tokens, or at a limit of conversations
        masked_B = np.array([completion.finish_reason == "length" for completion in completions])
        counted_B &= ~masked_B
    informative_P = _differ(scored, asked)
    if added:
        pairs = zip(added, completions, strict=True)
        any_B = np.array([values[sampled_mask(completion)].any() for values, completion in pairs])
        informative_P |= any_B.reshape(-1, size).any(axis=1)
    informative_P &= counted_B.reshape(-1, size).any(axis=1)
    taken_P = np.any(scores.scored.reshape(-1, size), axis=1)
    if drops_uninformative:
        counted_B &= np.repeat(informative_P, size)
        taken_P = taken_P & informative_P
    advantages_B = group_advantages(scores.total, group_size=size, algorithm=algorithm, known=asked, taken_P=taken_P)
    return Signal(
        step=rollout.batch.step,
        group_size=size,
        prompts=tuple(prompt.token_ids for prompt in rollout.row_prompts),
        completions=completions,
        advantages_B=advantages_B,
        added=added,
        counted_B=counted_B,
        informative_P=informative_P,
        masked_B=masked_B,
        from_rewards=from_rewards,
    )


def _differ(scored: ScoredRollout, asked: Mapping[str, np.ndarray]) -> Bool[np.ndarray, " P"]:
    """Mark the groups whose rewards differ."""
    judged_NPG = scored.scores.total.reshape(1, -1, scored.rollout.group_size)
    if "rewards_NPG" in asked:
        judged_NPG = asked["rewards_NPG"][asked["weights_N"] != 0.0]
    return np.any(differ(judged_NPG), axis=0)


def _asked(scored: ScoredRollout, rewards: Sequence[RewardSpec], algorithm: RunAlgorithm) -> dict[str, np.ndarray]:
    """Collect the arguments that the advantages request in addition to the total rewards; see `read_signal`."""
    asked, groups = algorithm.asked, (-1, scored.rollout.group_size)
    found: dict[str, np.ndarray] = {}
    if "lengths_PG" in asked:
        found["lengths_PG"] = np.array([c.sampled_tokens for c in scored.rollout.completions]).reshape(groups)
    if "rewards_NPG" in asked or "weights_N" in asked:
        by_name, of_tokens = scored.scores.by_name, scored.scores.token_rewards
        specs = [spec for spec in rewards if spec.shown not in of_tokens]
        if not specs:
            raise RewardError(
                f"these advantages take rewards of whole completions one by one, got only {list(of_tokens)}, which "
                "are per-token rewards; add another, or take another algorithm.advantage"
            )
        if missing := [spec.shown for spec in specs if spec.shown not in by_name]:
            raise RewardError(f"these advantages take rewards one by one, and {missing} are not scored; score them")
        found["rewards_NPG"] = np.stack([by_name[spec.shown].reshape(groups) for spec in specs])
        found["weights_N"] = np.array([spec.weight_at(scored.rollout.batch.step) for spec in specs])
    return found


def group_advantages(
    rewards_B: Float[np.ndarray, " B"],
    *,
    group_size: int,
    algorithm: RunAlgorithm,
    known: Mapping[str, np.ndarray] | None = None,
    taken_P: Bool[np.ndarray, " P"] | None = None,
) -> Float[np.ndarray, " B"]:
    """Compute the algorithm's advantages of B rows in float64; each ``group_size`` consecutive rows belong to one
    prompt.

    Rows with the reward NaN are unscored: their advantage is 0, and the algorithm gets masked arrays, whose means and
    standard deviations are of the others. Rewards of a group that do not `differ` are made equal.

    ``known`` holds further arguments that advantages may request, by their names in `ON_REQUEST` of
    tpu_grpo/algorithms/algorithm.py. The algorithm gets the groups marked in ``taken_P``, or all if it is None. The
    advantages of other groups are 0.

    Raises:
        RewardError: for a reward that the advantages refuse.
        NonFiniteError: for an advantage that is not finite.
    """
    rewards_PG = rewards_B.astype(np.float64).reshape(-1, group_size)
    scored_PG, differ_P1 = ~np.isnan(rewards_PG), differ(rewards_PG)[:, None]
    of_all = dict(known or {})
    means_P1 = np.ma.filled(np.ma.masked_invalid(rewards_PG).mean(axis=1, keepdims=True), 0.0)
    rewards_PG = np.where(scored_PG & differ_P1, rewards_PG, means_P1)  # also for classes that know of no masks
    if not scored_PG.all():
        rewards_PG = np.ma.masked_array(rewards_PG, ~scored_PG)
        of_all |= {name: np.ma.masked_array(of_all[name], ~scored_PG) for name in of_all.keys() & {"lengths_PG"}}
    taken_P = np.ones(len(rewards_PG), np.bool_) if taken_P is None else taken_P
    advantages_PG = np.zeros(rewards_PG.shape)
    if taken_P.any():
        of_taken = {  # in arrays with an axis of groups, it is the last but one
            name: values[..., taken_P, :] if values.ndim > 1 else values for name, values in of_all.items()
        }
        found_PG = np.ma.filled(algorithm.advantages(rewards_PG[taken_P], of_taken), 0.0)
        advantages_PG[taken_P] = np.where(scored_PG[taken_P], found_PG, 0.0)
    advantages_B = advantages_PG.reshape(-1)
    if (bad := np.flatnonzero(~np.isfinite(advantages_B))).size:
        group = rewards_PG[bad[0] // group_size].tolist()
        raise NonFiniteError(
            f"advantages must be finite, got {advantages_B[bad[0]]} in row {bad[0]}, for a group with the rewards "
            f"{group}; repair the algorithm's method advantages"
        )
    return advantages_B


def _scored_tokens(scored: ScoredRollout) -> TokenValues:
    """Check and return what the scores add to each token of every row."""
    per_token, completions = scored.scores.per_token, scored.rollout.completions
    if not per_token:
        return ()
    if len(per_token) != len(completions):
        raise RewardError(
            f"values per token must be given for every completion, got {len(per_token)} for {len(completions)}; give "
            "zeros where there is nothing to add"
        )
    found = []
    for row, (values, completion) in enumerate(zip(per_token, completions, strict=True)):
        added_T = np.asarray(values, np.float64)
        if added_T.shape != (count := len(completion.token_ids),):
            raise RewardError(
                f"values per token must be one number for every token of a completion, got the shape {added_T.shape} "
                f"for the {count} tokens of row {row}; the stop token counts, and so does what an environment answered"
            )
        if not np.isfinite(added_T).all():
            raise RewardError(f"values per token must be finite, got {added_T.tolist()} in row {row}; return numbers")
        found.append(added_T)
    return tuple(found)


# --- turns -----------------------------------------------------------------------------------------------------------


def turn_credits(rollout: Rollout, section: EnvironmentSection, skipped_B: Bool[np.ndarray, " B"]) -> TokenValues:
    """Return the terms that environment.turn_credit=turn adds to the advantages of the tokens of each turn.

    With r_bj the environment's reward for turn j of row b, K_b the row's number of turns, and M_k the rows of the group
    that have a turn k:

        R_bk = sum of r_bj over j = k .. K_b                the reward-to-go of row b from turn k on
        credit of turn k = R_bk - mean of R_ck over the rows c in M_k

    A k-th turn is compared only with the k-th turns of its group. For example, three conversations of 2, 2 and 1 turns:

        rewards   [0 1] [1 0] [1]
        R         [1 1] [1 0] [1]           means: of the first turns (1+1+1)/3 = 1, of the second ones (1+0)/2 = 0.5
        credit    [0 0.5] [0 -0.5] [0]

    The credit is added, without division by a standard deviation, to the advantages of all tokens that were sampled in
    the turn. A turn without a reward has the reward 0. A turn k that only one row reached has the credit 0. Rows marked
    in ``skipped_B``, whose environment failed, count in no mean. A completion without a conversation gets 0. Raises
    NonFiniteError, with row and turn, for a reward that is not finite.
    """
    if not section.is_on or section.turn_credit == "episode":
        return ()
    found: list[Float[np.ndarray, "_"]] = []
    for start in range(0, len(rollout.completions), rollout.group_size):
        rows = range(start, start + rollout.group_size)
        to_go = [[] if skipped_B[row] else _rewards_to_go(rollout.completions[row], row) for row in rows]
        of_turn = [[values[k] for values in to_go if len(values) > k] for k in range(max(map(len, to_go)))]
        means = [values[0] if len(set(values)) == 1 else sum(values) / len(values) for values in of_turn]
        for row, values in zip(rows, to_go, strict=True):
            completion = rollout.completions[row]
            added_T = np.zeros(len(completion.token_ids))
            turns = () if completion.episode is None else completion.episode.turns
            of_own = means[: len(values)]
            for turn, value, mean in zip(turns, values, of_own, strict=bool(values)):  # a skipped row has no values
                added_T[turn.start : turn.end] = value - mean
            found.append(added_T if completion.sampled is None else np.where(completion.sampled, added_T, 0.0))
    return tuple(found)


def _rewards_to_go(completion: Completion, row: int) -> list[float]:
    if completion.episode is None:
        return []
    rewards = [0.0 if turn.reward is None else float(turn.reward) for turn in completion.episode.turns]
    if (bad := np.flatnonzero(~np.isfinite(rewards))).size:
        raise NonFiniteError(
            f"the environment's reward of turn {bad[0] + 1} in row {row} must be finite, got {rewards[bad[0]]}; repair "
            f"the environment {completion.episode.environment}"
        )
    return list(accumulate(reversed(rewards)))[::-1]
