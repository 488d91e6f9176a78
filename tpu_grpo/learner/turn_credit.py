"""What single turns of a conversation are worth, with environment.turn_credit=turn, for the advantages of their tokens.

With r_bj the environment's reward for turn j of row b, K_b the row's turns, and M_k the rows of the group that have a
turn k:

    R_bk = sum of r_bj over j = k .. K_b                what the row got from turn k on
    credit of turn k = R_bk - mean of R_ck over the rows c in M_k

A turn is compared with the others' k-th turns alone. A group of three conversations of 2, 2 and 1 turns:

    rewards   [0 1] [1 0] [1]
    R         [1 1] [1 0] [1]           means: of the first turns (1+1+1)/3 = 1, of the second ones (1+0)/2 = 0.5
    credit    [0 0.5] [0 -0.5] [0]

The credit is added to the advantages of all tokens that were sampled in the turn, whichever branches they are in, as it
is: no deviation divides it. A turn without a reward has the reward 0. The last turn that only one row came to has the
credit 0, for there is nothing to compare it with. Rows that are skipped because their environment failed are no rows.

Suffixes: P prompts, G completions of each, B = P*G rows, T tokens of a completion.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import RunConfig
from tpu_grpo.records.errors import NonFiniteError
from tpu_grpo.records.stages import Completion, Rollout


def turn_credits(rollout: Rollout, config: RunConfig) -> tuple[Float[np.ndarray, "_"], ...]:
    """Return for every row what is added to the advantage of each token of its completion, float64 [T].

    That is nothing, an empty tuple, unless the config wants it. A completion without a conversation gets 0.

    Raises:
        NonFiniteError: for a reward that is not finite; names row and turn.
    """
    if not config.environment.is_on or config.environment.turn_credit == "episode":
        return ()
    taken_B = ~skipped_rows(rollout, config)
    size = rollout.group_size
    found: list[Float[np.ndarray, "_"]] = []
    for start in range(0, len(rollout.completions), size):
        rows = range(start, start + size)
        to_go = [_rewards_to_go(rollout.completions[row], row) if taken_B[row] else [] for row in rows]
        means = _means_by_turn(to_go)
        for row, values in zip(rows, to_go, strict=True):
            found.append(_of_tokens(rollout.completions[row], [value - means[k] for k, value in enumerate(values)]))
    return tuple(found)


def skipped_rows(rollout: Rollout, config: RunConfig) -> Bool[np.ndarray, " B"]:
    """Say which conversations count nowhere, because their environment failed and environment.on_error is skip."""
    skips, episodes = config.environment.on_error == "skip", [one.episode for one in rollout.completions]
    return np.array([skips and episode is not None and episode.failure is not None for episode in episodes], np.bool_)


def _rewards_to_go(completion: Completion, row: int) -> list[float]:
    """Return for each turn the sum of the rewards from it on."""
    if completion.episode is None:
        return []
    rewards = [0.0 if turn.reward is None else float(turn.reward) for turn in completion.episode.turns]
    if (bad := np.flatnonzero(~np.isfinite(rewards))).size:
        raise NonFiniteError(
            f"the environment's reward of turn {bad[0] + 1} in row {row} must be finite, got {rewards[bad[0]]}; repair "
            f"the environment {completion.episode.environment}"
        )
    return list(accumulate(reversed(rewards)))[::-1]


def _means_by_turn(to_go: Sequence[Sequence[float]]) -> list[float]:
    """Return for each turn the mean over the rows that have it."""
    longest = max(map(len, to_go))
    of_turn = [[values[k] for values in to_go if len(values) > k] for k in range(longest)]
    return [values[0] if len(set(values)) == 1 else sum(values) / len(values) for values in of_turn]


def _of_tokens(completion: Completion, credits: Sequence[float]) -> Float[np.ndarray, "_"]:
    added_T = np.zeros(len(completion.token_ids))
    turns = () if completion.episode is None else completion.episode.turns
    for turn, credit in zip(turns, credits, strict=False):  # a row that is not taken has no credits
        added_T[turn.start : turn.end] = credit
    return added_T if completion.sampled is None else np.where(completion.sampled, added_T, 0.0)
