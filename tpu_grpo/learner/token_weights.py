"""How much every token counts: aggregation, masks and denominators of the whole step in one number per token.

    loss = sum over all tokens of the step of weight * token loss

The weights are made on the host and are data to the train step. The gradient therefore depends neither on the
micro-batches nor on the mesh, and one program serves every aggregation. Suffixes: B rows of the step, T completion
tokens.

    sequence-mean-token-mean     1 / (R n_i)      R rows with tokens, n_i tokens in the row
    token-mean                   1 / sum n_i
    sequence-mean-token-scale    1 / (R T)
"""

import numpy as np
from jaxtyping import Bool, Float

from tpu_grpo.config import LossAggregation


def token_weights(mask_BT: Bool[np.ndarray, "B T"], aggregation: LossAggregation) -> Float[np.ndarray, "B T"]:
    """Compute the weight of every token, float32; 0 where ``mask_BT`` is not set."""
    lengths_B1 = mask_BT.sum(axis=1, keepdims=True, dtype=np.float64)
    rows = max((lengths_B1 > 0).sum(), 1)
    match aggregation:
        case "sequence-mean-token-mean":
            denominators_B1 = rows * lengths_B1
        case "token-mean":
            denominators_B1 = np.full_like(lengths_B1, lengths_B1.sum())
        case "sequence-mean-token-scale":
            denominators_B1 = np.full_like(lengths_B1, rows * mask_BT.shape[1])
    return (mask_BT / np.maximum(denominators_B1, 1.0)).astype(np.float32)
