"""LUSPO, Length-Unbiased Sequence Policy Optimization (arXiv 2602.05261).

In GSPO a token counts less the longer its completion is. LUSPO multiplies the loss of each completion by its length, so
that token losses are summed over a completion (the aggregation sequence-mean-token-sum). The default clip is 2e-3 below
and 2.5e-3 above (section 5.1). Advantages are GRPO's.
"""

from tpu_grpo.algorithms.gspo import Gspo
from tpu_grpo.config import LossAggregation


class Luspo(Gspo):
    """GSPO whose token losses are summed over a completion, not averaged."""

    aggregation: LossAggregation = "sequence-mean-token-sum"
    default_clip = (2e-3, 2.5e-3)
