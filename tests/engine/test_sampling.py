"""The sampler: drawn frequencies and the noise behind them, against exact distributions."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests.engine.sampling_columns import columns
from tpu_grpo.engine import sampling
from tpu_grpo.engine.sampling import sample_tokens

PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = np.log(PROBS)
DRAWS = 20_000
SAMPLE = jax.jit(sample_tokens)


def draw(rows: int = DRAWS, **settings: float) -> tuple[np.ndarray, np.ndarray]:
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (rows, len(LOGITS)))
    tokens, logprobs, _ = SAMPLE(logits, columns(rows, **settings))
    return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, PROBS**2),
        ({"temperature": 2.0}, PROBS**0.5),
        ({"top_k": 2}, PROBS * [1, 1, 0, 0, 0]),
        ({"top_p": 0.75}, PROBS * [1, 1, 1, 0, 0]),
        ({"min_p": 0.2}, PROBS * [1, 1, 1, 1, 0]),
        # Temperature first: the squared masses are 0.16, 0.09, ... of 0.2850, so top-p 0.8 keeps two tokens, not three.
        ({"temperature": 0.5, "top_p": 0.8}, PROBS**2 * [1, 1, 0, 0, 0]),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.99, "min_p": 0.2}, PROBS**2 * [1, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_frequencies_are_the_distributions(settings: dict[str, float], weights: np.ndarray) -> None:
    tokens, _ = draw(DRAWS, **settings)
    expected = DRAWS * weights / weights.sum()
    counts = np.bincount(tokens, minlength=len(PROBS))
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-3


def test_logprobs_are_of_the_full_distribution_at_the_temperature() -> None:
    for settings in ({}, {"top_k": 2}, {"top_p": 0.5, "min_p": 0.3}):
        for temperature in (0.5, 1.0, 3.0):
            tokens, logprobs = draw(64, temperature=temperature, **settings)
            weights = PROBS ** (1 / temperature)
            np.testing.assert_allclose(logprobs, np.log(weights / weights.sum())[tokens], atol=1e-6)


def test_greedy_takes_the_likeliest_at_temperature_one() -> None:
    tokens, logprobs = draw(16, temperature=0.0, top_k=3)
    assert tokens.tolist() == [0] * 16
    np.testing.assert_allclose(logprobs, np.log(0.4), atol=1e-6)


def test_rows_with_filters_leave_others_alone() -> None:
    """Batching: a row's token is the same whether or not another row filters, is greedy, or is there at all."""
    alone, _ = draw(32)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (32, len(LOGITS)))
    mixed = columns(32)._replace(
        top_k=jnp.arange(32, dtype=jnp.int32) % 2, temperature=jnp.where(jnp.arange(32) % 4 == 1, 0.0, 1.0)
    )
    tokens, *_ = SAMPLE(logits, mixed)
    assert np.asarray(tokens)[::2].tolist() == alone[::2].tolist()
    assert set(np.asarray(tokens)[1::2].tolist()) == {0}


@pytest.mark.parametrize("part", ["seed", "step", "prompt", "sample", "position"])
def test_every_part_of_the_key_decides(part: str) -> None:
    """512 rows that differ in nothing draw one token; let any one part differ and they draw the distribution."""
    rows = 512
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (rows, len(LOGITS)))
    same = columns(rows)._replace(key=jnp.ones((rows, 4), jnp.uint32))
    assert len(set(np.asarray(SAMPLE(logits, same)[0]).tolist())) == 1
    if part == "position":
        varied = same._replace(position=jnp.arange(rows))
    else:
        column = ["seed", "step", "prompt", "sample"].index(part)
        varied = same._replace(key=same.key.at[:, column].set(jnp.arange(rows, dtype=jnp.uint32)))
    counts = np.bincount(np.asarray(SAMPLE(logits, varied)[0]), minlength=5)
    assert stats.chisquare(counts, rows * PROBS).pvalue > 1e-3


def test_one_program_serves_all_settings() -> None:
    program = jax.jit(lambda logits, settings: sample_tokens(logits, settings))
    logits = jnp.zeros((4, 5))
    for settings in ({}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5, "min_p": 0.1, "temperature": 2.0}):
        program(logits, columns(4, **settings))
    assert cast(Any, program)._cache_size() == 1


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_is_gumbel_distributed() -> None:
    """2 million values in cells of equal probability, and the largest 2,000 in cells of 100, against exact theory."""
    count = 2**21
    noise = np.asarray(sampling._gumbel(jnp.arange(4, dtype=jnp.uint32), jnp.int32(5), count), np.float64)
    above = count * -np.expm1(-np.exp(-noise))  # how many values are expected above each
    assert stats.chisquare(np.histogram(above, bins=np.linspace(0, count, 101))[0]).pvalue > 1e-3
    largest = np.histogram(above, bins=np.arange(0, 2001, 100))[0]
    assert stats.chisquare([*largest, count - largest.sum()], [100] * 20 + [count - 2000]).pvalue > 1e-3


def test_noise_ends_at_34() -> None:
    """Bits become -log(-log(1 - u)), with u made of the upper 24 bits of both words."""
    rng = np.random.default_rng(0)
    coarse = (2.0 ** rng.uniform(0, 32, 5_000)).astype(np.uint32)
    coarse[:8] = [0, 0, 0, 0, 1, 2**32 - 1, 2**31 - 1, 2**31]
    fine = rng.integers(0, 2**32, 5_000).astype(np.uint32)
    fine[:4] = [0, 2**8, 2**31, 2**32 - 1]
    noise = np.asarray(sampling._gumbel_of_bits(jnp.asarray(coarse), jnp.asarray(fine)), np.float64)
    assert np.isfinite(noise).all()
    assert noise[0] == pytest.approx(49 * np.log(2), rel=1e-6) == noise.max()  # the smallest u is 2^-49
    assert noise[5] == pytest.approx(-np.log(24 * np.log(2)), rel=1e-6)  # and the largest is 1 - 2^-24
    u = (coarse >> 8) / 2**24 + ((fine >> 8) + 0.5) / 2**48
    near_one = coarse >= 2**31
    np.testing.assert_allclose(noise[~near_one], -np.log(-np.log1p(-u[~near_one])), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(-np.expm1(-np.exp(-noise[near_one])), u[near_one], atol=2.0**-23)


@pytest.mark.slow
def test_a_far_tail_is_drawn_as_often_as_it_should() -> None:
    """151,935 tokens, each 17 nats below the likeliest, have 0.63 % of the mass together: 25 of 4,000 draws."""
    rows, vocabulary = 20, 151_936
    logits = jnp.zeros((rows, vocabulary)).at[:, 0].set(17.0)
    drawn = 0
    for batch in range(200):
        tokens, *_ = SAMPLE(logits, columns(rows)._replace(position=jnp.full(rows, batch, jnp.int32)))
        drawn += int((np.asarray(tokens) != 0).sum())
    share = float((vocabulary - 1) * np.exp(-17.0))
    assert stats.binomtest(drawn, 200 * rows, share / (1 + share)).pvalue > 1e-3
