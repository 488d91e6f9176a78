"""Distillation on a vocabulary of five tokens, where every expectation is a sum; gradients are worked out by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_grpo.algorithms import Taught, open_algorithm
from tpu_grpo.algorithms.gkd import divergence, with_rest
from tpu_grpo.config import AlgorithmSection
from tpu_grpo.records.errors import ConfigError

LOGITS = np.array([0.3, -0.7, 1.1, 0.0, -1.6])
TEACHER = np.array([0.4, 0.1, 0.2, 0.25, 0.05])
"""The teacher's probabilities; its likeliest tokens are 0, 3, 2, 1, 4."""


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def algorithm(name: str, **options: Any) -> Any:
    return open_algorithm(AlgorithmSection(name=name, options=options))


# --- the reverse divergence on sampled tokens ------------------------------------------------------------------------


def reverse_gradient(p: np.ndarray) -> np.ndarray:
    """d KL(p || teacher) / d logits = p (log(p / teacher) - KL)."""
    gaps = np.log(p / TEACHER)
    return p * (gaps - p @ gaps)


@jax.grad
def distilled(logits: Any, old: Any, weights: Any) -> Any:
    """The loss of `policy_loss` over all tokens of the vocabulary, each with its weight."""
    logps = jax.nn.log_softmax(logits)
    advantages = jax.lax.stop_gradient(jnp.log(TEACHER) - logps)
    losses = algorithm("distill").token_losses(logps[None], old[None], advantages[None])
    return (losses.loss_BT[0] * weights).sum()


@pytest.mark.parametrize("moved", [0.0, 0.05])
def test_the_expected_gradient_is_that_of_the_reverse_divergence(moved: float) -> None:
    """Also of the current policy's where an older one has sampled, as long as no ratio is clipped."""
    old = softmax(LOGITS + moved * np.array([1, -1, 2, 0, 1]))
    found = distilled(jnp.asarray(LOGITS), jnp.log(old), jnp.asarray(old))
    np.testing.assert_allclose(found, reverse_gradient(softmax(LOGITS)), atol=1e-6)


def test_the_estimate_from_samples_is_unbiased() -> None:
    p, rng = softmax(LOGITS), np.random.default_rng(0)
    gaps = np.log(p / TEACHER)
    each = gaps[:, None] * (np.eye(5) - p)  # the gradient from one sampled token: gap x (onehot - p)
    counts = rng.multinomial(20_000, p)
    mean, square = counts @ each / 20_000, counts @ each**2 / 20_000
    error = np.sqrt((square - mean**2) / 20_000)
    found = distilled(jnp.asarray(LOGITS), jnp.log(p), jnp.asarray(counts / 20_000))
    np.testing.assert_allclose(found, mean, atol=1e-6)
    assert (np.abs(mean - reverse_gradient(p)) < 4 * error).all()


def test_rewards_are_only_measured() -> None:
    assert algorithm("distill").advantages(np.array([[0.0, 1.0]])).tolist() == [[0.0, 0.0]]
    assert algorithm("gkd").advantages(np.array([[3.0]])).tolist() == [[0.0]]


# --- the divergence over the likeliest tokens ------------------------------------------------------------------------


def binned(values: np.ndarray, order: np.ndarray, top: int) -> np.ndarray:
    """Probabilities of the first ``top`` tokens in this order, and of the rest together, if there is one."""
    chosen = values[order]
    return chosen if top == len(values) else np.append(chosen[:top], chosen[top:].sum())


def by_hand(mix: float, top: int, order: np.ndarray) -> tuple[float, np.ndarray]:
    """The divergence, and its gradient with respect to the logits.

    With m = b p + (1 - b) q over bins, d JSD / d q_i = (1 - b) log(q_i / m_i), because the other terms cancel. The
    forward divergence has -p_i / q_i, the reverse one log(q_i / p_i) + 1. A softmax turns g into q_j (g_j - q . g), and
    a token of the rest has its share of the rest's.
    """
    q_V = softmax(LOGITS)
    p, q = binned(TEACHER, order, top), binned(q_V, order, top)
    if mix == 0.0:
        value, slope = (p * np.log(p / q)).sum(), -p / q
    elif mix == 1.0:
        value, slope = (q * np.log(q / p)).sum(), np.log(q / p) + 1
    else:
        m = mix * p + (1 - mix) * q
        value = mix * (p * np.log(p / m)).sum() + (1 - mix) * (q * np.log(q / m)).sum()
        slope = (1 - mix) * np.log(q / m)
    of_bins, gradient = q * (slope - q @ slope), np.zeros(5)
    for place, token in enumerate(order):
        at = min(place, len(q) - 1)
        gradient[token] = of_bins[at] * q_V[token] / q[at]
    return value, gradient


def divergence_of(mix: float, top: int, order: np.ndarray, weight: float = 1.0) -> tuple[Any, Any]:
    """Of two equal tokens, each with half of the weight."""
    rest = np.append(np.log(binned(TEACHER, order, top))[:top], np.log(TEACHER[order][top:].sum() or 1.0))
    teacher, weights, zeros = jnp.tile(rest, (1, 2, 1, 1)), jnp.full((1, 2, 1), weight / 2), jnp.zeros((1, 2))

    def loss(logits: Any) -> Any:
        policy = jnp.tile(jax.nn.log_softmax(logits)[order[:top]], (1, 2, 1, 1))
        taught = Taught(teacher, policy, weights, has_rest=top < 5)
        return algorithm("gkd", mix=mix, top_k=top).token_losses(zeros, zeros, zeros, taught=taught).loss_BT.sum()

    return jax.value_and_grad(loss)(jnp.asarray(LOGITS))


@pytest.mark.parametrize("top", [1, 3, 5])
@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_values_and_gradients_by_hand(mix: float, top: int) -> None:
    order = np.argsort(-TEACHER)
    value, gradient = by_hand(mix, top, order)
    found, slope = divergence_of(mix, top, order, weight=2.0)
    assert float(found) == pytest.approx(2 * value, abs=1e-6)
    np.testing.assert_allclose(slope, 2 * gradient, atol=1e-6)


def test_a_rest_of_nothing_has_a_logarithm() -> None:
    """Two tokens have all of the probability, as far as float32 tells; the rest counts as 1e-7."""
    rests, slopes = jax.value_and_grad(lambda logps: with_rest(logps)[0, -1])(jnp.log(jnp.array([[0.25, 0.75]])))
    assert float(rests) == pytest.approx(np.log(1e-7), abs=1e-6)
    assert np.isfinite(slopes).all()


def test_its_limits_are_the_divergences() -> None:
    p, q = jnp.log(TEACHER), jax.nn.log_softmax(jnp.asarray(LOGITS))
    for small in (1e-2, 1e-3):
        forward, reverse = float(divergence(p, q, 0)), float(divergence(p, q, 1))
        assert float(divergence(p, q, small)) / small == pytest.approx(forward, rel=2 * small)
        assert float(divergence(p, q, 1 - small)) / small == pytest.approx(reverse, rel=2 * small)


def test_bins_hide_a_part_of_the_divergence() -> None:
    order = np.argsort(-TEACHER)
    for mix in (0.0, 0.3, 1.0):
        values = [by_hand(mix, top, order)[0] for top in (1, 2, 3, 5)]
        assert values == sorted(values)


@pytest.mark.parametrize(("options", "told"), [({"mix": 1.5}, "mix .* 1.5"), ({"top_k": 0}, "top_k .* got 0")])
def test_options_that_cannot_be(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        algorithm("gkd", **options)
