"""Token sampling: one program serves all settings, and a token depends on its key, position and logits alone.

Suffixes: B rows, V vocabulary.

Order of the filters: temperature, top-k, top-p, min-p. The log-probability is that of the *full* distribution at the
temperature, before any filter, in float32: the quantity the trainer computes for the same token. Drawing uses the
Gumbel-max trick (argmax of log-probabilities plus Gumbel noise is a sample of the distribution), with noise keyed by
(seed, step, prompt, sample, position) through threefry: batch, mesh, host and cache do not enter.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from tpu_grpo.rollout.arrays import AnyArray


class SamplingColumns(NamedTuple):
    """The settings and keys of each row, as arrays, so that no setting is compiled in."""

    temperature: Float[AnyArray, " B"]
    """The temperature; 0 means greedy."""
    top_k: Int[AnyArray, " B"]
    """How many of the likeliest tokens are kept; 0 keeps all."""
    top_p: Float[AnyArray, " B"]
    min_p: Float[AnyArray, " B"]
    key: UInt32[AnyArray, "B 4"]
    """The row's seed, step, prompt and sample."""
    position: Int[AnyArray, " B"]
    """The index that the sampled token will have in its sequence."""


def sample_tokens(
    logits_BV: Float[Array, "B V"], columns: SamplingColumns
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draw one token per row.

    Returns:
        Token ids (int32) and their float32 log-probabilities under the full distribution at the temperature (at
        temperature 1 for greedy rows).
    """
    greedy_B = columns.temperature == 0.0
    scaled_BV = logits_BV.astype(jnp.float32) / (columns.temperature + greedy_B)[:, None]
    filters_on = jnp.any((columns.top_k > 0) | (columns.top_p < 1.0) | (columns.min_p > 0.0))
    kept_BV = jax.lax.cond(filters_on, filter_logits, lambda scaled, _: scaled, scaled_BV, columns)
    noise_BV = jax.vmap(_gumbel, in_axes=(0, 0, None))(columns.key, columns.position, scaled_BV.shape[-1])
    drawn_B = jnp.argmax(kept_BV + noise_BV, axis=-1)
    token_B = jnp.where(greedy_B, jnp.argmax(scaled_BV, axis=-1), drawn_B).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - jax.nn.logsumexp(scaled_BV, axis=-1)


def filter_logits(scaled_BV: Float[Array, "B V"], columns: SamplingColumns) -> Float[Array, "B V"]:
    """Set logits that top-k, then top-p, then min-p drop to -inf; ties at a threshold are kept.

    Thresholds are found by bisection: a sort of the vocabulary takes XLA's compiler for TPUs a minute per program.
    """
    rank_BV, vocabulary = _ranks(scaled_BV), scaled_BV.shape[-1]
    k_B = jnp.where(columns.top_k > 0, jnp.minimum(columns.top_k, vocabulary), vocabulary)
    kth_B = _lowest(lambda rank_B1: jnp.sum(rank_BV > rank_B1, axis=-1) < k_B, scaled_BV)
    in_top_k_BV = jnp.where(rank_BV >= kth_B[:, None], scaled_BV, -jnp.inf)
    probs_BV = jax.nn.softmax(in_top_k_BV, axis=-1)
    last_B = _lowest(
        lambda rank_B1: jnp.sum(jnp.where(rank_BV > rank_B1, probs_BV, 0.0), axis=-1) < columns.top_p, scaled_BV
    )
    last_B = jnp.where(columns.top_p >= 1.0, kth_B, jnp.maximum(kth_B, last_B))
    likeliest_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True)
    in_min_p_BV = scaled_BV >= likeliest_B1 + jnp.log(columns.min_p)[:, None]
    return jnp.where((rank_BV >= last_B[:, None]) & in_min_p_BV, scaled_BV, -jnp.inf)


def _ranks(values_BV: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Map float32 numbers to integers of the same order: their bits, which are inverted for negative numbers."""
    bits_BV = jax.lax.bitcast_convert_type(values_BV, jnp.int32)
    return bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)


def _lowest(enough: Callable[[Int[Array, "B 1"]], Bool[Array, " B"]], like_BV: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Find the lowest rank per row for which ``enough`` holds; it must hold for all higher ranks, too."""
    bounds = jnp.iinfo(jnp.int32)
    lowest_B = jnp.full_like(like_BV[:, 0], bounds.min, jnp.int32)
    highest_B = jnp.full_like(like_BV[:, 0], bounds.max, jnp.int32)

    def halve(_: int, within: tuple[Array, Array]) -> tuple[Array, Array]:
        low_B, high_B = within
        middle_B = (low_B & high_B) + ((low_B ^ high_B) >> 1)  # half way, rounded down, without overflow
        found_B = enough(middle_B[:, None])
        return jnp.where(found_B, low_B, middle_B + 1), jnp.where(found_B, middle_B, high_B)

    return jax.lax.fori_loop(0, 32, halve, (lowest_B, highest_B))[1]


def _gumbel(key: UInt32[Array, " 4"], position: Int[Array, ""], vocabulary: int) -> Float[Array, " V"]:
    random_key = jax.random.key(key[0])
    for part in (key[1], key[2], key[3], position):
        random_key = jax.random.fold_in(random_key, part)
    return jax.random.gumbel(random_key, (vocabulary,), jnp.float32)
