"""Advantages of single tokens: those of their completion, and what scores add to each of its tokens.

advantages_B    [ 0.5          -0.5    ]      of two completions, from their total rewards
per_token       [[0 0.25 -1]   [0 0.5] ]      `Scores.per_token`
                [[0.5 0.75 -0.5]  [-0.5 0]]
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from tpu_grpo.errors import RewardError
from tpu_grpo.types import ScoredRollout


def token_advantages(
    advantages_B: Float[np.ndarray, " B"], scored: ScoredRollout
) -> Float[np.ndarray, " B"] | Sequence[Float[np.ndarray, "_"]]:
    """Add to the advantage of each completion what the scores say of its tokens; the same numbers if they say nothing.

    Raises:
        RewardError: for values that are not one finite number for every token of every completion; names the row.
    """
    per_token, completions = scored.scores.per_token, scored.rollout.completions
    if not per_token:
        return advantages_B
    if len(per_token) != len(completions):
        raise RewardError(
            f"values per token must be given for every completion, got {len(per_token)} for {len(completions)}; give "
            "zeros where there is nothing to add"
        )
    found = []
    for row, (advantage, values, completion) in enumerate(zip(advantages_B, per_token, completions, strict=True)):
        added_T = np.asarray(values, np.float64)
        if added_T.shape != (count := len(completion.token_ids),):
            raise RewardError(
                f"values per token must be one number for every sampled token, got the shape {added_T.shape} for the "
                f"{count} tokens of row {row}; the stop token counts, too"
            )
        if not np.isfinite(added_T).all():
            raise RewardError(f"values per token must be finite, got {added_T.tolist()} in row {row}; return numbers")
        found.append(advantage + added_T)
    return found
