"""What a run says at its start of settings that work, but not as one might think."""

import math

from tpu_grpo.config import RunConfig

LONG_ANSWER = 128
"""Tokens from which on a product of ratios is likely to leave its bounds, see `_of_products`."""
USUAL_GAP = 0.01
"""Nats by which engine and trainer may differ at a token in bfloat16."""


def notices(config: RunConfig) -> list[str]:
    """Return sentences, each with the settings that it is about and what to do."""
    return [*_of_filters(config), *_of_products(config)]


def _of_filters(config: RunConfig) -> list[str]:
    """Tokens are drawn from one distribution, and the ratio is of another."""
    filters = config.rollout.filters
    if not filters or config.algorithm.filtered_ratio:
        return []
    shown = " and ".join(f"rollout.{name}={value:g}" for name, value in filters.items())
    return [
        f"{shown} biases the ratio: tokens are drawn among those that it keeps, and the ratio is of the full "
        "distributions; set algorithm.filtered_ratio=true for that among the kept tokens"
    ]


def _of_products(config: RunConfig) -> list[str]:
    """The logarithm of a product grows with the number of its factors."""
    tokens = config.rollout.max_new_tokens
    if config.algorithm.correction != "sequence" or tokens <= LONG_ANSWER:
        return []
    return [
        f"algorithm.correction=sequence multiplies up to rollout.max_new_tokens={tokens} ratios: {USUAL_GAP} nats a "
        f"token become a factor of e^{USUAL_GAP * tokens:.1f} = {math.exp(min(USUAL_GAP * tokens, 700.0)):.3g}, beyond "
        "any bound, and most long completions are cut or masked; algorithm.correction=geometric does not grow with "
        "length"
    ]
