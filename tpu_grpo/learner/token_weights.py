"""How much every token counts: aggregation, masks and denominators of a whole update in one number per token.

    loss = sum over all tokens of the update of weight * token loss

An update is on a step, or on a mini-batch of it (mini_batches.py), which then has denominators of its own.

The weights are made on the host and are data to the train step. The gradient therefore depends neither on the
micro-batches, nor on how rows are packed, nor on the mesh, and one program serves every aggregation. All tokens of a
completion have the same weight:

    sequence-mean-token-mean     1 / (B n_i)      B completions with tokens, n_i tokens in completion i
    token-mean                   1 / sum n_i
    sequence-mean-token-scale    1 / (B T)        T = rollout.max_new_tokens
    prompt-mean-token-mean       1 / (P n_p)      P prompts with tokens, n_p tokens in all completions of prompt p

Tokens are those that the policy sampled: of a conversation those of all its turns and branches, and none that an
environment answered.
"""

import numpy as np
from jaxtyping import Float, Int

from tpu_grpo.config import LossAggregation


def token_weights(
    counts_B: Int[np.ndarray, " B"], aggregation: LossAggregation, max_new_tokens: int, group_size: int = 1
) -> Float[np.ndarray, " B"]:
    """Compute the weight of each token of completions with ``counts_B`` tokens, float64; 0 for one without tokens.

    Of the B completions, ``group_size`` in a row are of one prompt.
    """
    counts_B = counts_B.astype(np.float64)
    rows = max((counts_B > 0).sum(), 1)
    match aggregation:
        case "sequence-mean-token-mean":
            denominators_B = rows * counts_B
        case "token-mean":
            denominators_B = np.full_like(counts_B, counts_B.sum())
        case "sequence-mean-token-scale":
            denominators_B = np.full_like(counts_B, float(rows * max_new_tokens))
        case "prompt-mean-token-mean":
            counts_P = counts_B.reshape(-1, group_size).sum(axis=1)
            denominators_B = np.repeat(max((counts_P > 0).sum(), 1) * counts_P, group_size)
    return (counts_B > 0) / np.maximum(denominators_B, 1.0)
