"""CISPO, Clipped IS-weight Policy Optimization (MiniMax 2025, "MiniMax-M1", arXiv 2506.13585), section 3.1.

With GRPO's clip, a token whose ratio is beyond the clip has no gradient. In CISPO every token has one: the
log-probability is weighted with the ratio, and this weight is clipped and has no gradient (equations 4 and 5). A
token's loss is

    - stop_gradient(clip(ratio, lowest, highest)) A log policy

averaged over all tokens of a step. Advantages are GRPO's.

The paper gives no value for the upper bound, and has no lower bound. Either cap or clip_high sets the upper bound:

    options: {cap: 5.0}      highest = cap; used by default. Caps of 4, 5 and 8 perform alike (ScaleRL, arXiv
                             2510.13786). A cap below 1, such as TRL's 0.28, clips nearly every token's weight
    clip_high: 4.0           highest = 1 + clip_high
    clip_low: 0.2            lowest = 1 - clip_low. There is no lower bound by default: it would keep a token's weight
                             up while its ratio falls, and so push the policy further away
"""

import jax
import jax.numpy as jnp

from tpu_grpo.algorithms.algorithm import PerToken, TokenLosses, token_ratio
from tpu_grpo.algorithms.grpo import Grpo
from tpu_grpo.config import LossAggregation
from tpu_grpo.records.errors import ConfigError

CAP = 5.0


class Cispo:
    """Weights every token's log-probability with its clipped ratio."""

    aggregation: LossAggregation = "token-mean"
    numbers = ("_lowest", "_highest")
    advantage_formula = Grpo.advantage_formula
    advantages = Grpo.advantages

    def __init__(self, clip_low: float | None = None, clip_high: float | None = None, cap: float | None = None):
        if cap is not None and clip_high is not None:
            raise ConfigError(
                f"algorithm.options.cap={cap} and algorithm.clip_high={clip_high} exclude each other: cispo cuts the "
                "ratio at cap or at 1 + clip_high; set one of them"
            )
        if cap is not None and cap <= 0.0:
            raise ConfigError(f"algorithm.options.cap must be > 0, got {cap}; it cuts the ratio, which is about 1")
        self._lowest = 0.0 if clip_low is None else 1 - clip_low
        self._highest = 1 + clip_high if clip_high is not None else CAP if cap is None else cap

    @property
    def formula(self) -> str:
        """The formula of a token's loss, with the bounds of the weight."""
        highest = f"{self._highest:g}"
        weight = f"clip(r, {self._lowest:g}, {highest})" if self._lowest else f"min(r, {highest})"
        return f"-sg({weight})*A*log(p)"

    def token_losses(self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken) -> TokenLosses:
        """Return minus weight times advantage times log-probability."""
        ratio_BT = token_ratio(logprobs_BT, old_logprobs_BT)
        weight_BT = jax.lax.stop_gradient(jnp.clip(ratio_BT, self._lowest, self._highest))
        cut_BT = (ratio_BT < self._lowest) | (ratio_BT > self._highest)
        return TokenLosses(-weight_BT * advantages_BT * logprobs_BT, cut_BT)
