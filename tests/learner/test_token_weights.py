"""How much every token counts, against numbers worked by hand."""

from typing import Any, get_args

import numpy as np
import pytest

from tpu_grpo.config import LossAggregation
from tpu_grpo.learner.rows import token_weights

COUNTS = np.array([4, 1, 0, 2])
"""7 tokens in all; T = 4."""
BY_HAND = {
    "sequence-mean-token-mean": [1 / 12, 1 / 3, 0, 1 / 6],
    "token-mean": [1 / 7, 1 / 7, 0, 1 / 7],
    "sequence-mean-token-scale": [1 / 12, 1 / 12, 0, 1 / 12],
    "prompt-mean-token-mean": [1 / 10, 1 / 10, 0, 1 / 4],
}
"""The first two completions are of one prompt, the others of another."""


@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
def test_weights_by_hand(aggregation: Any) -> None:
    np.testing.assert_allclose(token_weights(COUNTS, aggregation, 4, 2), BY_HAND[aggregation], rtol=1e-15)


@pytest.mark.parametrize("aggregation", get_args(LossAggregation))
def test_without_any_token_nothing_counts(aggregation: Any) -> None:
    assert not token_weights(np.zeros(2, int), aggregation, 3).any()


def test_prompts_without_tokens_are_none_to_the_mean_over_prompts() -> None:
    found = token_weights(np.array([0, 0, 3, 1]), "prompt-mean-token-mean", 4, 2)
    np.testing.assert_allclose(found, [0, 0, 1 / 4, 1 / 4], rtol=1e-15)


def test_weighted_sums_are_the_means_that_they_are_named_after() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 8, 16)
    mask, losses = np.arange(8) < lengths[:, None], rng.normal(size=(16, 8))
    rows = [line[:length] for line, length in zip(losses, lengths, strict=True)]
    means: dict[Any, Any] = {
        "sequence-mean-token-mean": np.mean([row.mean() for row in rows]),
        "token-mean": np.concatenate(rows).mean(),
        "sequence-mean-token-scale": np.mean([row.sum() / 8 for row in rows]),
        "prompt-mean-token-mean": np.mean([np.concatenate(rows[start : start + 4]).mean() for start in (0, 4, 8, 12)]),
    }
    for aggregation, mean in means.items():
        weights = token_weights(lengths, aggregation, 8, 4)[:, None]
        assert (weights * mask * losses).sum() == pytest.approx(mean, rel=1e-12)
