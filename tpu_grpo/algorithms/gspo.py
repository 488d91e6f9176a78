"""GSPO, Group Sequence Policy Optimization (Zheng et al. 2025, arXiv 2507.18071), sections 4.1 and 4.3.

The ratio of a whole completion i, which is the geometric mean of its tokens' ratios (equation 7), replaces every
token's own ratio in GRPO's clipped surrogate (equation 5):

    s_i = exp(mean_t log(policy(o_it) / old policy(o_it)))

so that a completion is clipped as a whole. These ratios stay near 1. Therefore the default clip is 3e-4 below and
4e-4 above (section 5.1). Advantages are GRPO's (equation 6).

The option per_token selects GSPO-token (equations 13 and 14), whose ratio

    s_it = stop_gradient(s_i) policy(o_it) / stop_gradient(policy(o_it))

has the value of s_i, and the gradient of the token's own log-probability. Where all tokens of a completion have the
same advantage, losses and gradients are those of GSPO.
"""

import jax

from tpu_grpo.algorithms.algorithm import PerToken, Sequences, TokenLosses, limited_exp
from tpu_grpo.algorithms.grpo import Grpo


class Gspo(Grpo):
    """Clips the ratio of whole completions; advantages and surrogate are inherited from GRPO."""

    default_clip = (3e-4, 4e-4)

    def __init__(
        self,
        clip_low: float | None = None,
        clip_high: float | None = None,
        dual_clip: float | None = None,
        delta: float | None = None,
        per_token: bool = False,
    ):
        low, high = self.default_clip
        low, high = low if clip_low is None else clip_low, high if clip_high is None else clip_high
        super().__init__(low, high, dual_clip, delta)
        self._per_token = per_token

    @property
    def credits_tokens(self) -> bool:
        """Whether a token's advantage weights only that token's gradient, not the gradients of the whole completion."""
        return self._per_token

    @property
    def formula(self) -> str:
        """The formula of a token's loss, with the bounds of the clip."""
        mean = "exp(mean_t(log(r)))"
        return f"{self.surrogate_formula('s')}; s = {f'sg({mean})*p/sg(p)' if self._per_token else mean}"

    def token_losses(  # it also takes sequences
        self, logprobs_BT: PerToken, old_logprobs_BT: PerToken, advantages_BT: PerToken, sequences: Sequences
    ) -> TokenLosses:
        """Return minus the clipped surrogate, with the completion's ratio at each of its tokens."""
        log_ratio_BT = sequences.mean(logprobs_BT - old_logprobs_BT)
        if self._per_token:
            log_ratio_BT = jax.lax.stop_gradient(log_ratio_BT) + logprobs_BT - jax.lax.stop_gradient(logprobs_BT)
        return self.clipped_surrogate(limited_exp(log_ratio_BT), advantages_BT)
