"""Which groups can be learnt from, and which completions count in the loss.

    rewards of a group      [1 1 1 1]   uninformative: no completion is better than another, and no token either
                            [0 1 0 0]   informative
                            [1 0 | |]   informative; with truncated=mask the last two, which were cut, do not count
    [1 1 0 x]   informative; with environment.on_error=skip the last, whose environment failed, does not count

Turns that were worth more or less than others (turn_credit.py) make a group informative like tokens.

Suffixes: P prompts, G completions of each, B = P*G rows, N rewards of the config.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import RunConfig
from tpu_grpo.learner.sequences import sampled_mask
from tpu_grpo.learner.token_advantages import token_advantages
from tpu_grpo.learner.turn_credit import skipped_rows
from tpu_grpo.records.stages import Rollout, ScoredRollout


def informative_groups(
    scored: ScoredRollout, known: Mapping[str, np.ndarray], config: RunConfig
) -> Bool[np.ndarray, " P"]:
    """Say which groups have different rewards, or a token that is rewarded by itself, and a completion that counts.

    That is the total reward; but each reward that has a weight, if ``known`` holds them one by one because the
    advantages ask for them (see `ON_REQUEST` in algorithms/algorithm.py).

    Raises:
        RewardError, NonFiniteError: for what is said of tokens or turns and is not a number for each; names the row.
    """
    totals_PG = scored.scores.total.reshape(-1, scored.rollout.group_size)
    judged = [totals_PG]
    if "rewards_NPG" in known:
        judged = list(known["rewards_NPG"][known["weights_N"] != 0.0])
    informative_P = np.zeros(len(totals_PG), np.bool_)
    for rewards_PG in judged:
        informative_P |= _vary(rewards_PG)
    of_tokens, completions = token_advantages(np.zeros(totals_PG.size), scored, config), scored.rollout.completions
    if not isinstance(of_tokens, np.ndarray):
        any_B = np.array([v[sampled_mask(one)].any() for v, one in zip(of_tokens, completions, strict=True)])
        informative_P |= any_B.reshape(totals_PG.shape).any(axis=1)
    return informative_P & (~_left_out(scored.rollout, config)).reshape(totals_PG.shape).any(axis=1)


def counted_rows(rollout: Rollout, informative_P: Bool[np.ndarray, " P"], config: RunConfig) -> Bool[np.ndarray, " B"]:
    """Say which completions count in the loss.

    algorithm.drop_uninformative, algorithm.truncated and environment.on_error decide that.
    """
    counted_B = ~_left_out(rollout, config)
    if config.drops_uninformative:
        counted_B &= np.repeat(informative_P, rollout.group_size)
    return counted_B


def signal_metrics(rollout: Rollout, informative_P: Bool[np.ndarray, " P"], config: RunConfig) -> dict[str, float]:
    """Measure which share of a step's groups taught something, and of its completions was masked, if any are."""
    metrics = {"groups/informative_fraction": float(informative_P.mean())}
    if config.algorithm.truncated == "mask":
        metrics["completions/masked_fraction"] = float(truncated_rows(rollout).mean())
    return metrics


def truncated_rows(rollout: Rollout) -> Bool[np.ndarray, " B"]:
    """Say which completions were cut at rollout.max_new_tokens, or which conversations at a limit of theirs."""
    return np.array([completion.finish_reason == "length" for completion in rollout.completions])


def _left_out(rollout: Rollout, config: RunConfig) -> Bool[np.ndarray, " B"]:
    """Say which completions do not count in the loss, whatever the others of their group are."""
    left_out_B = skipped_rows(rollout, config)
    return left_out_B | truncated_rows(rollout) if config.algorithm.truncated == "mask" else left_out_B


def _vary(rewards_PG: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, " P"]:
    """Say which groups hold different values; NaN, where a reward does not apply, is none."""
    applies_PG = ~np.isnan(rewards_PG)
    highest_P = np.where(applies_PG, rewards_PG, -np.inf).max(axis=1)
    return highest_P > np.where(applies_PG, rewards_PG, np.inf).min(axis=1)
