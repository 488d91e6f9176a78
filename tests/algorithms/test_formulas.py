"""Advantages and token losses against values worked out by hand, and what holds for any rewards."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from tpu_grpo.algorithms import SHIPPED, RunAlgorithm, open_algorithm, token_ratio
from tpu_grpo.config import AlgorithmSection

STD = np.sqrt(7.0) + 1e-6
"""The group 1, 2, 6 has the mean 3 and the variance (4 + 1 + 9) / 2 = 7."""
BY_HAND = {
    "grpo": [[-2 / STD, -1 / STD, 3 / STD], [0, 0, 0]],
    "dr_grpo": [[-2, -1, 3], [0, 0, 0]],
    "rloo": [[1 - 4, 2 - 3.5, 6 - 1.5], [0, 0, 0]],  # the means of the others are 4, 3.5 and 1.5
}
OWN_ADVANTAGES = {"dapo": "grpo", "gspo": "grpo", "cispo": "grpo", "sapo": "grpo", "dppo": "dr_grpo"} | {
    "reinforce": "dr_grpo"
}
"""Whose advantages the others take."""


def opened(name: str, **section: Any) -> RunAlgorithm:
    return open_algorithm(AlgorithmSection.model_validate({"name": name, **section}))


def test_every_shipped_algorithm_is_tested_here() -> None:
    assert {*BY_HAND, *OWN_ADVANTAGES} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_advantages_by_hand(name: str) -> None:
    found = opened(name).advantages(np.array([[1.0, 2.0, 6.0], [5.0, 5.0, 5.0]]))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, BY_HAND[OWN_ADVANTAGES.get(name, name)], atol=1e-15)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "dapo"])
def test_token_losses_by_hand(name: str) -> None:
    # Ratios 1, 1.5, 0.5 for an advantage of 2 and for one of -1; the ratio may move from 0.9 to 1.4.
    logprobs = jnp.log(jnp.array([[0.2, 0.3, 0.1], [0.2, 0.3, 0.1]]))
    old, advantages = jnp.log(jnp.full((2, 3), 0.2)), jnp.array([[2.0] * 3, [-1.0] * 3])
    algorithm = opened(name, clip_low=0.1, clip_high=0.4)
    loss, clipped = algorithm.token_losses(logprobs, old, advantages)
    # Clipping holds back what would be gained: an advantage of 2 beyond 1.4, and one of -1 below 0.9.
    np.testing.assert_allclose(loss, [[-2.0, -2.8, -1.0], [1.0, 1.5, 0.9]], rtol=1e-6)
    assert np.asarray(clipped).tolist() == [[False, True, False], [False, False, True]]
    assert loss.dtype == jnp.float32

    gradient = jax.grad(lambda now: algorithm.token_losses(now, old, advantages).loss_BT.sum())(logprobs)
    # The gradient of -A ratio by the log-probability is -A ratio, and nothing where the clip decides.
    np.testing.assert_allclose(gradient, [[-2.0, 0.0, -1.0], [1.0, 1.5, 0.0]], rtol=1e-6)


def test_a_clip_that_is_not_set_above_is_the_one_below() -> None:
    logprobs, old = jnp.log(jnp.array([[0.26]])), jnp.log(jnp.array([[0.2]]))
    loss, _ = opened("grpo", clip_low=0.1).token_losses(logprobs, old, jnp.ones((1, 1)))
    np.testing.assert_allclose(loss, [[-1.1]], rtol=1e-6)


def test_ratios_stay_finite() -> None:
    ratio = token_ratio(jnp.array([[0.0, -500.0]]), jnp.array([[-500.0, 0.0]]))
    np.testing.assert_allclose(ratio, np.exp([[20.0, -20.0]]), rtol=1e-6)


def test_aggregations() -> None:
    assert {name: opened(name).aggregation for name in SHIPPED} == {
        "grpo": "sequence-mean-token-mean",
        "dr_grpo": "sequence-mean-token-scale",
        "rloo": "sequence-mean-token-scale",
        "dapo": "token-mean",
        "gspo": "sequence-mean-token-mean",
        "cispo": "token-mean",
        "dppo": "token-mean",
        "sapo": "sequence-mean-token-mean",
        "reinforce": "sequence-mean-token-scale",
    }
    set_by_hand = open_algorithm(AlgorithmSection(name="rloo", loss_aggregation="token-mean"))
    assert set_by_hand.aggregation == "token-mean"


def test_the_advantages_of_another_algorithm() -> None:
    algorithm = open_algorithm(AlgorithmSection(name="grpo", advantage="rloo"))
    np.testing.assert_allclose(algorithm.advantages(np.array([[1.0, 2.0, 6.0]])), [BY_HAND["rloo"][0]])
    assert algorithm.aggregation == "sequence-mean-token-mean"


@settings(max_examples=50, deadline=None)
@given(
    rewards=arrays(np.float64, (5, 4), elements=st.floats(-10, 10)),
    name=st.sampled_from(list(SHIPPED)),
    seed=st.integers(0, 1000),
)
def test_groups_sum_to_zero_and_do_not_see_each_other(rewards: np.ndarray, name: str, seed: int) -> None:
    algorithm = opened(name)
    found = algorithm.advantages(rewards)
    np.testing.assert_allclose(found.sum(axis=1), 0.0, atol=1e-6)
    order = np.random.default_rng(seed).permutation(5)
    np.testing.assert_allclose(algorithm.advantages(rewards[order]), found[order], atol=1e-12)
    within = np.random.default_rng(seed).permutation(4)
    np.testing.assert_allclose(algorithm.advantages(rewards[:, within]), found[:, within], atol=1e-6)
