"""Advantages of single tokens: those of their completion, and what is added to each of its tokens.

advantages_B    [ 0.5          -0.5    ]      of two completions, from their total rewards
per_token       [[0 0.25 -1]   [0 0.5] ]      `Scores.per_token`
                [[0.5 0.75 -0.5]  [-0.5 0]]

Turns of conversations may add to them, too, see turn_credit.py. What is said of a token that an environment answered is
ignored, see rows.py.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tpu_grpo.config import RunConfig
from tpu_grpo.learner.turn_credit import turn_credits
from tpu_grpo.records.errors import RewardError
from tpu_grpo.records.stages import ScoredRollout


def token_advantages(
    advantages_B: Float[np.ndarray, " B"], scored: ScoredRollout, config: RunConfig
) -> Float[np.ndarray, " B"] | Sequence[Float[np.ndarray, "_"]]:
    """Add to the advantage of each completion what is said of its tokens; the same numbers if nothing is.

    That is what the scores say, and with environment.turn_credit=turn what each turn was worth.

    Raises:
        RewardError: for values that are not one finite number for every token of every completion; names the row.
    """
    added = [values for values in (_of_scores(scored), turn_credits(scored.rollout, config)) if values]
    if not added:
        return advantages_B
    return [advantage + sum(values) for advantage, *values in zip(advantages_B, *added, strict=True)]


def _of_scores(scored: ScoredRollout) -> Sequence[Float[np.ndarray, "_"]]:
    """Return what the scores add to each token of every row; nothing if they add nothing."""
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
    return found
