"""The sampler: filters against hand-worked cases, and drawn frequencies against the exact distribution."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tpu_grpo.rollout.sampling import SamplingColumns, filter_logits, sample_tokens

PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = np.log(PROBS)
DRAWS = 20_000


def columns(rows: int = 1, **settings: float) -> SamplingColumns:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    key = np.zeros((rows, 4), np.uint32)
    key[:, 0], key[:, 3] = 11, np.arange(rows)  # one seed, a sample number per row
    return SamplingColumns(
        temperature=jnp.full(rows, values["temperature"], jnp.float32),
        top_k=jnp.full(rows, values["top_k"], jnp.int32),
        top_p=jnp.full(rows, values["top_p"], jnp.float32),
        min_p=jnp.full(rows, values["min_p"], jnp.float32),
        key=jnp.asarray(key),
        position=jnp.full(rows, 7, jnp.int32),
    )


def draw(rows: int = DRAWS, **settings: float) -> tuple[np.ndarray, np.ndarray]:
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (rows, len(LOGITS)))
    tokens, logprobs = jax.jit(sample_tokens)(logits, columns(rows, **settings))
    return np.asarray(tokens), np.asarray(logprobs)


def kept(**settings: float) -> list[int]:
    filtered = filter_logits(jnp.asarray(LOGITS, jnp.float32)[None], columns(1, **settings))
    return np.flatnonzero(np.isfinite(np.asarray(filtered)[0])).tolist()


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.3}, [0]),  # the likeliest alone has 0.4
        ({"top_p": 0.69}, [0, 1]),  # 0.4 < 0.69 <= 0.7
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"min_p": 0.3}, [0, 1, 2]),  # 0.3 * 0.4 = 0.12
        ({"min_p": 1.0}, [0]),
        # After top-k 3 the masses are 0.4, 0.3, 0.15 of 0.85: before token 2 lies 0.824, so top-p 0.82 drops it, though
        # of the whole distribution only 0.7 lies before it.
        ({"top_k": 3, "top_p": 0.82}, [0, 1]),
        ({"top_p": 0.82}, [0, 1, 2]),
        ({"top_p": 0.9, "min_p": 0.5}, [0, 1]),
    ],
    ids=str,
)
def test_filters_keep_what_they_say(settings: dict[str, float], tokens: list[int]) -> None:
    assert kept(**settings) == tokens


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The definition, in float64."""
    order = np.argsort(-logits, kind="stable")
    by_value = logits[order].astype(np.float64)
    weights = np.exp(by_value - by_value[0])
    inside = np.arange(len(logits)) < (top_k or len(logits))
    share = np.where(inside, weights, 0.0) / weights[inside].sum()
    inside &= (np.cumsum(share) - share < top_p) | (top_p >= 1.0)
    inside &= weights >= min_p
    return np.sort(order[inside])


@pytest.mark.parametrize("scale", [0.1, 3.0, 1e4])
@pytest.mark.parametrize("vocabulary", [2, 257, 50_000])
def test_filters_are_those_of_a_sort(vocabulary: int, scale: float) -> None:
    """Random logits of both signs, some of them masked: no two alike, and no threshold within rounding of a mass."""
    rng = np.random.default_rng(vocabulary)
    logits = (scale * rng.normal(size=vocabulary)).astype(np.float32)
    logits[rng.random(vocabulary) < 0.1] = -np.inf
    logits[0] = scale
    possible = np.isfinite(logits)
    for top_k, top_p, min_p in [(1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.37, 0.0), (40, 0.613, 0.0), (100, 0.9, 0.021)]:
        settings = columns(top_k=top_k, top_p=top_p, min_p=min_p)
        filtered = np.asarray(filter_logits(jnp.asarray(logits)[None], settings)[0])
        expected = np.intersect1d(kept_by_sorting(logits, top_k, top_p, min_p), np.flatnonzero(possible))
        assert np.flatnonzero(np.isfinite(filtered)).tolist() == expected.tolist()
        np.testing.assert_array_equal(filtered[expected], logits[expected])


def test_ties_at_a_threshold_are_kept() -> None:
    logits = jnp.asarray([[1.0, 2.0, 2.0, 0.0]])
    filtered = np.asarray(filter_logits(logits, columns(top_k=1)))
    assert np.isfinite(filtered[0]).tolist() == [False, True, True, False]


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
    tokens, _ = sample_tokens(logits, mixed)
    assert np.asarray(tokens)[::2].tolist() == alone[::2].tolist()
    assert set(np.asarray(tokens)[1::2].tolist()) == {0}


@pytest.mark.parametrize("part", ["seed", "step", "prompt", "sample", "position"])
def test_every_part_of_the_key_decides(part: str) -> None:
    """512 rows that differ in nothing draw one token; let any one part differ and they draw the distribution."""
    rows = 512
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (rows, len(LOGITS)))
    same = columns(rows)._replace(key=jnp.ones((rows, 4), jnp.uint32))
    assert len(set(np.asarray(sample_tokens(logits, same)[0]).tolist())) == 1
    if part == "position":
        varied = same._replace(position=jnp.arange(rows))
    else:
        column = ["seed", "step", "prompt", "sample"].index(part)
        varied = same._replace(key=same.key.at[:, column].set(jnp.arange(rows, dtype=jnp.uint32)))
    counts = np.bincount(np.asarray(sample_tokens(logits, varied)[0]), minlength=5)
    assert stats.chisquare(counts, rows * PROBS).pvalue > 1e-3


def test_one_program_serves_all_settings() -> None:
    program = jax.jit(lambda logits, settings: sample_tokens(logits, settings))
    logits = jnp.zeros((4, 5))
    for settings in ({}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5, "min_p": 0.1, "temperature": 2.0}):
        program(logits, columns(4, **settings))
    assert cast(Any, program)._cache_size() == 1
