"""Token sampling: one program serves all settings, and a token depends on its key, position and logits alone.

Order of the filters: temperature, top-k, top-p, min-p. Log-probabilities are float32. They are taken under the *full*
distribution at the temperature, before any filter, as in the trainer. With ``algorithm.filtered_ratio`` they are taken
under the distribution over the tokens that the filters keep, and the number of kept tokens is returned too. Drawing
uses the Gumbel-max trick (argmax of log-probabilities plus Gumbel noise is a sample of the distribution).
Threefry makes the noise from (seed, step, prompt, sample, position); batch, mesh, host and cache do not change it.

Embedding and output head are sharded by vocabulary over the devices of an engine (the embedding by sglang-jax, the
output head by us). A token's embedding is read on the device that has its row; an all-reduce of [T, D], as after
every layer, brings it to all devices. Each device computes the logits of its own part of the vocabulary. Sampling a
token needs all logits of a row on one device: see ``sample_rows``.

Suffixes: B rows, V vocabulary, D width, N ranks that one pass over the vocabulary tries.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt32
from sgl_jax.srt.layers.embeddings import Embed
from sgl_jax.srt.layers.logits_processor import LogitsProcessor

from tpu_grpo.models.thresholds import LARGEST_RANK, TRIALS, ranks, trials, values

if TYPE_CHECKING:
    AnyArray = Any
    """A numpy array on the host and a jax array in the compiled step; no type checker can follow that."""
else:
    AnyArray = jax.Array | np.ndarray

FIRST_STEP = 2.0
"""The spacing, in logits, of the thresholds that the first pass tries, from the largest logit down. Nearly all
thresholds lie in the range that they span, which holds only few of all float32 numbers."""
MOST_LIKELIEST = 20
"""How many of the likeliest tokens a request gets that asks for them."""
VOCABULARY_LEAVES = ("embed_tokens.embedding", "lm_head.embedding")
"""The names of all parameters of shape [V, D] end in one of these."""


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
    likeliest: tuple[()] | None = None
    """() if a row's request asks for the likeliest tokens, which takes a program of its own; else None."""


class Drawn(NamedTuple):
    """One token of each row."""

    token: Int[Array, " B"]
    logprob: Float[Array, " B"]
    """Taken under the full distribution at the temperature (at 1 if greedy), or with ``filtered`` over kept tokens."""
    kept: Int[Array, " B"] | None
    """The number of tokens that the filters kept; None without ``filtered``."""
    likeliest: tuple[Int[Array, "B K"], Float[Array, "B K"]] | None = None
    """The MOST_LIKELIEST likeliest tokens and their ``logprob``; None if no row's request asks for them."""


def sample_tokens(logits_BV: Float[Array, "B V"], columns: SamplingColumns, *, filtered: bool = False) -> Drawn:
    """Draw one token per row; with ``filtered``, log-probabilities are taken over the tokens that the filters keep."""
    greedy_B = columns.temperature == 0.0
    scaled_BV = logits_BV.astype(jnp.float32) / (columns.temperature + greedy_B)[:, None]
    noise_BV = jax.vmap(_gumbel, in_axes=(0, 0, None))(columns.key, columns.position, scaled_BV.shape[-1])
    kept_BV = filter_logits(scaled_BV, columns)
    score_BV = jnp.where(greedy_B[:, None], scaled_BV, kept_BV + noise_BV)
    token_B = jax.lax.platform_dependent(score_BV, cpu=argmax_in_two, default=functools.partial(jnp.argmax, axis=-1))
    chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0]
    if not filtered:
        total_B, found = jax.nn.logsumexp(scaled_BV, axis=-1), None
        if columns.likeliest is not None:
            top_BK, tokens_BK = jax.lax.top_k(scaled_BV, MOST_LIKELIEST)
            found = tokens_BK, top_BK - total_B[:, None]
        return Drawn(token_B, chosen_B - total_B, None, found)
    counts_B = jnp.sum(kept_BV > -jnp.inf, axis=-1, dtype=jnp.int32)
    return Drawn(token_B, chosen_B - jax.nn.logsumexp(kept_BV, axis=-1), counts_B)


def argmax_in_two(values_BV: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Return the first index of each row's maximum by two reductions, a maximum and a minimum of indices.

    XLA computes argmax on CPUs element by element, with all that it fuses into it, such as the noise.
    """
    last, most_B1 = values_BV.shape[1] - 1, jnp.max(values_BV, axis=-1, keepdims=True)
    index_BV = jax.lax.broadcasted_iota(jnp.int32, values_BV.shape, 1)
    return jnp.min(jnp.where(values_BV == most_B1, index_BV, last), axis=-1)  # NaN equals nothing


def sample_rows(
    logits_BV: Float[Array, "B V"], columns: SamplingColumns, mesh: Mesh, *, filtered: bool = False
) -> Drawn:
    """Draw one token per row, as ``sample_tokens`` does; each device of ``mesh`` draws for an equal part of the rows.

    One all-to-all turns logits that are sharded by vocabulary into whole rows. One device then computes every maximum
    and sum over a row's vocabulary, in the same order as without sharding, so sharding the vocabulary changes no token.
    """
    rows, by_rows = len(logits_BV), P("tensor")
    padding = -rows % mesh.shape["tensor"]
    logits_BV, columns = jax.tree.map(
        lambda x: jnp.pad(x, ((0, padding), *(((0, 0),) * (x.ndim - 1)))), (logits_BV, columns)
    )
    by_device = jax.tree.map(lambda x: jax.sharding.reshard(x, by_rows), (logits_BV, columns))
    draw = functools.partial(sample_tokens, filtered=filtered)
    drawn = jax.shard_map(draw, in_specs=by_rows, out_specs=by_rows, check_vma=False)(*by_device)
    return jax.tree.map(lambda column: column[:rows], jax.sharding.reshard(drawn, P()))


class WholeVocabularyLogits(LogitsProcessor):
    """The library's LogitsProcessor for an output head that is replicated on every device."""

    def _get_logits(self, hidden_states: Float[Array, "B D"], lm_head: Embed) -> Float[Array, "B V"]:
        """Compute the logits of all rows on every device."""
        head_VD = lm_head.embedding.get_value()
        states_BD, head_VD = lm_head.promote_dtype((hidden_states, head_VD), dtype=lm_head.dtype)
        logits_BV = jnp.dot(states_BD, head_VD.T, out_sharding=NamedSharding(self.mesh, P("data", None)))
        return jnp.tanh(logits_BV / self.soft_cap) * self.soft_cap if self.soft_cap else logits_BV


def filter_logits(scaled_BV: Float[Array, "B V"], columns: SamplingColumns) -> Float[Array, "B V"]:
    """Set to -inf the logits that top-k, then top-p, then min-p drop; logits equal to a threshold are kept.

    Top-k and top-p are computed only if some row uses them. Greedy rows use neither, and padding rows are greedy.
    """
    sampled_B = columns.temperature > 0.0
    by_top_k_B = sampled_B & (columns.top_k > 0) & (columns.top_k < scaled_BV.shape[-1])
    by_top_p_B = sampled_B & (columns.top_p < 1.0)
    likeliest_B, none_B = jnp.max(scaled_BV, axis=-1), jnp.full_like(columns.top_k, -LARGEST_RANK - 1)

    def last_dropped() -> Int[Array, " B"]:
        highest_B = ranks(likeliest_B)
        high_B = jnp.where(by_top_k_B, highest_B, none_B)
        dropped_B = _last_dropped(scaled_BV, jnp.ones((1, 1)), columns.top_k.astype(jnp.float32), none_B, high_B)
        high_B = jnp.where(by_top_p_B, highest_B, dropped_B)

        def by_mass() -> Int[Array, " B"]:
            weight_BV = jnp.exp(scaled_BV - likeliest_B[:, None])
            mass_B = jnp.sum(jnp.where(scaled_BV > values(dropped_B)[:, None], weight_BV, 0.0), axis=-1)
            return _last_dropped(scaled_BV, weight_BV, columns.top_p * mass_B, dropped_B, high_B)

        return jax.lax.cond(jnp.any(by_top_p_B), by_mass, lambda: dropped_B)

    dropped_B = jax.lax.cond(jnp.any(by_top_k_B | by_top_p_B), last_dropped, lambda: none_B)
    in_min_p_BV = scaled_BV - likeliest_B[:, None] >= jnp.log(columns.min_p)[:, None]
    return jnp.where((scaled_BV > values(dropped_B)[:, None]) & in_min_p_BV, scaled_BV, -jnp.inf)


def _last_dropped(
    scaled_BV: Float[Array, "B V"],
    weight_BV: Float[Array, "#B #V"],
    needed_B: Float[Array, " B"],
    low_B: Int[Array, " B"],
    high_B: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Find the highest rank per row such that the weights of all higher logits add up to ``needed`` or more.

    Ranks are integers in the order of float32 logits (tpu_grpo/models/thresholds.py). The result is in [low, high),
    or low if low >= high. Of at most 9 passes, the first tries likely ranks, and each later one leaves a 16th of the
    range. (A sort would take XLA for TPUs a minute to compile.) Token counts are exact up to 2^24; masses are float32
    sums.
    """

    def open_rows(state: tuple[Array, Array, Array]) -> Array:
        low_B, high_B, _ = state
        return jnp.any(low_B + 1 < high_B)

    def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        (low_B, high_B, trial_BN), needed_B1 = state, needed_B[:, None]
        above_BN, lowest_B, highest_B = _survey(scaled_BV, weight_BV, *map(values, (trial_BN, low_B, high_B)))
        low_B = jnp.max(jnp.where(above_BN >= needed_B1, trial_BN, low_B[:, None]), axis=-1)
        high_B = jnp.min(jnp.where(above_BN >= needed_B1, high_B[:, None], trial_BN), axis=-1)
        low_B, high_B = jnp.maximum(low_B, ranks(lowest_B) - 1), jnp.minimum(high_B, ranks(highest_B))
        high_B = jnp.where(jnp.any(above_BN == needed_B1, axis=-1), low_B, high_B)
        return low_B, high_B, trials(low_B, high_B)

    return jax.lax.while_loop(open_rows, narrow, (low_B, high_B, _first_trials(low_B, high_B)))[0]


def _survey(
    scaled_BV: Float[Array, "B V"],
    weight_BV: Float[Array, "#B #V"],
    trial_BN: Float[Array, "B N"],
    low_B: Float[Array, " B"],
    high_B: Float[Array, " B"],
) -> tuple[Float[Array, "B N"], Float[Array, " B"], Float[Array, " B"]]:
    """Sum the weights above each trial, and find the lowest logit above ``low`` and the highest up to ``high``.

    XLA for TPUs fuses all of these into one pass over the rows. The sums are written one by one because the
    alternatives are slower: on a CPU, XLA runs one reduction of several operands sequentially, and a reduction of
    [B, N, V] takes 5 times as long.
    """
    above = [jnp.sum(jnp.where(scaled_BV > trial_BN[:, n, None], weight_BV, 0.0), axis=-1) for n in range(TRIALS)]
    lowest_B = jnp.min(jnp.where(scaled_BV > low_B[:, None], scaled_BV, jnp.inf), axis=-1)
    highest_B = jnp.max(jnp.where(scaled_BV <= high_B[:, None], scaled_BV, -jnp.inf), axis=-1)
    return jnp.stack(above, axis=-1), lowest_B, highest_B


def _first_trials(low_B: Int[Array, " B"], high_B: Int[Array, " B"]) -> Int[Array, "B N"]:
    """Return the first ranks to try: logits from ``high`` down in steps of FIRST_STEP, smaller if ``low`` is near."""
    value_B = values(high_B)
    step_B = jnp.minimum((value_B - values(low_B)) / (TRIALS + 1), FIRST_STEP)
    trial_BN = ranks(value_B[:, None] - step_B[:, None] * jnp.arange(1, TRIALS + 1))
    return jnp.clip(trial_BN, low_B[:, None], jnp.maximum(low_B, high_B - 1)[:, None])


def _gumbel(key: UInt32[Array, " 4"], position: Int[Array, ""], vocabulary: int) -> Float[Array, " V"]:
    """Return standard Gumbel noise for each token, from one hash of its id.

    ``jax.random.gumbel`` uses 23 of a hash's 64 bits, or hashes twice (mode="high"). With 23 bits, noise is at most
    15.9, and tokens whose logits are more than 20.4 below the largest would never be drawn.
    """
    random_key = jax.random.key(key[0])
    for part in (key[1], key[2], key[3], position):
        random_key = jax.random.fold_in(random_key, part)
    token_V = jax.lax.iota(jnp.uint32, vocabulary)
    words = [jnp.broadcast_to(word, vocabulary) for word in jax.random.key_data(random_key)]
    return _gumbel_of_bits(*threefry2x32_p.bind(*words, jnp.zeros_like(token_V), token_V))


def _gumbel_of_bits(coarse_V: UInt32[Array, " V"], fine_V: UInt32[Array, " V"]) -> Float[Array, " V"]:
    """Map random bits to -log(-log(1 - u)), from -2.82 to 33.97; u in (0, 1) has 48 bits below 0.5, and 24 above."""
    u_V = (coarse_V >> 8).astype(jnp.float32) * 2.0**-24
    finer_V = u_V + ((fine_V >> 8).astype(jnp.float32) + 0.5) * 2.0**-48
    return -jnp.log(-jnp.log1p(-jnp.where(u_V < 0.5, finer_V, u_V)))  # from 0.5 on, finer bits could round up to 1
