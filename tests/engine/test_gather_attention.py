"""Paged attention against a plain softmax in float64, for any page size and any mix of lengths."""

from functools import partial

import jax
import numpy as np
import pytest

from tpu_grpo.engine.gather_attention import (
    BLOCKS_AT_ONCE,
    QUERY_BLOCK,
    Scoring,
    block_metadata,
    decode_attention,
    prefill_attention,
)

KV_HEADS, GROUP, WIDTH, CONTEXT = 2, 3, 8, 80
SCALE = WIDTH**-0.5
SCORINGS = [
    Scoring(SCALE),
    Scoring(SCALE, window=1),
    Scoring(SCALE, window=7, soft_cap=0.5),
    Scoring(SCALE, window=40),
    Scoring(SCALE, soft_cap=1.5),
    Scoring(SCALE, window=1000),  # longer than any row
]


def cache_of(rows: int, page: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A cache whose pages are dealt to the rows at random: (pages [.., page, K, 2, D], page table [rows, N])."""
    per_row = -(-CONTEXT // page)
    paged = rng.normal(size=(rows * per_row + 1, page, KV_HEADS, 2, WIDTH)).astype(np.float32)
    return paged, 1 + rng.permutation(rows * per_row).reshape(rows, per_row).astype(np.int32)


def plain_attention(q: np.ndarray, cached: np.ndarray, scoring: Scoring) -> np.ndarray:
    """The query [K, G, D] of the last cached token against cached tokens [L, K, 2, D], float64."""
    cached = cached[-scoring.window :] if scoring.window else cached
    scores = np.einsum("kgd,lkd->kgl", q, cached[:, :, 0], dtype=np.float64) * scoring.scale
    if scoring.soft_cap:
        scores = scoring.soft_cap * np.tanh(scores / scoring.soft_cap)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgl,lkd->kgd", weights / weights.sum(-1, keepdims=True), cached[:, :, 1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "scoring"), [*((page, SCORINGS[0]) for page in (1, 4, 16, 64)), *((4, other) for other in SCORINGS[1:])]
)
def test_decode_matches_plain_softmax(page: int, scoring: Scoring) -> None:
    rng = np.random.default_rng(page)
    lens = np.array([1, 2, 31, 32, 33, 80, 0, 64], np.int32)
    paged, pages = cache_of(len(lens), page, rng)
    q = rng.normal(size=(len(lens), KV_HEADS, GROUP, WIDTH)).astype(np.float32)
    out = np.asarray(jax.jit(partial(decode_attention, scoring=scoring))(q, paged, pages, lens))
    for row, length in enumerate(lens):
        cached = paged[pages[row]].reshape(-1, KV_HEADS, 2, WIDTH)[:length]
        expected = plain_attention(q[row], cached, scoring) if length else 0.0
        np.testing.assert_allclose(out[row], expected, atol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "scoring"), [*((page, SCORINGS[0]) for page in (1, 4, 16)), *((4, other) for other in SCORINGS[1:])]
)
def test_prefill_matches_plain_causal_softmax(page: int, scoring: Scoring) -> None:
    """A whole prompt, one token after a long prefix, a chunk in the middle, exactly a block, and padding rows."""
    rng = np.random.default_rng(page)
    prefix = np.array([0, 70, 20, 5, 0, 0], np.int32)
    new = np.array([40, 1, 33, 16, 0, 0], np.int32)
    paged, pages = cache_of(len(new), page, rng)
    total = 100  # ten tokens of padding
    q = rng.normal(size=(total, KV_HEADS, GROUP, WIDTH)).astype(np.float32)
    metadata = block_metadata(pages, new, total)
    out = np.asarray(jax.jit(partial(prefill_attention, scoring=scoring))(q, paged, metadata, prefix))
    token = 0
    for row, count in enumerate(new):
        cached = paged[pages[row]].reshape(-1, KV_HEADS, 2, WIDTH)
        for offset in range(count):
            expected = plain_attention(q[token], cached[: prefix[row] + offset + 1], scoring)
            np.testing.assert_allclose(out[token], expected, atol=2e-6)
            token += 1
    assert token == 90
    assert np.isfinite(out).all()


def test_blocks_by_hand() -> None:
    """Rows of 20, 0 and 3 new tokens: blocks (row 0, from 0), (row 0, from 16), (row 2, from 0), the rest padding."""
    metadata = block_metadata(np.zeros((3, 1), np.int32), np.array([20, 0, 3], np.int32), 32)
    assert metadata.block_row[:3].tolist() == [0, 0, 2]
    assert metadata.block_start[:3].tolist() == [0, QUERY_BLOCK, 0]
    assert metadata.block_length.tolist() == [20, 20, 3] + [0] * (len(metadata.block_length) - 3)
    assert len(metadata.block_row) == BLOCKS_AT_ONCE
    assert metadata.block_token[1].tolist() == list(range(16, 32))
    assert metadata.block_token[2][:3].tolist() == [20, 21, 22]
    assert metadata.token_slot[[0, 15, 16, 19, 20, 22]].tolist() == [0, 15, 16, 19, 32, 34]
