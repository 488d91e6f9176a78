"""Paged attention for any device, with sglang-jax's backend interface: each row gathers its own pages.

This attention costs rows x length, and is right for any page size. Each row's cache is read in chunks of CHUNK_TOKENS
with a running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867). The loop over chunks ends at the end of the
longest row, so one program serves every length.

Queries of a prefill are split into blocks of QUERY_BLOCK tokens of one row. So a row's cost is proportional to its new
tokens, even when a row with a whole prompt runs beside rows whose prompts are in the cache.

Suffixes: b rows of the batch, B rows (padded), L context, N pages of a row, T new tokens of all rows, R rows or blocks
that attend together, Q queries of each, K key-value heads, G query heads per key-value head, H = K G query heads,
D head width, C tokens of a chunk.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from tpu_grpo.engine.attention import AttentionMode, Columns, Windows, bits_of, decode, encode, padded
from tpu_grpo.engine.sampling import AnyArray

QUERY_BLOCK = 16
BLOCKS_AT_ONCE = 8
CHUNK_TOKENS = 32
DECODE_GROUPS = 2
"""Decode rows attend in this many independent groups, which a CPU computes in parallel."""
MASKED = -1e30
CACHE_PARTITION = P(None, None, "tensor")
"""Key-value heads are sharded over the devices of an engine."""


class GatherMetadata(NamedTuple):
    """The pages of each row. The other fields divide a prefill's queries into blocks, and are empty in decode steps."""

    pages_BN: Int[AnyArray, "B N"]
    block_row: Int[AnyArray, " blocks"]
    block_start: Int[AnyArray, " blocks"]
    """The first query of the block, counted from the row's first new token."""
    block_length: Int[AnyArray, " blocks"]
    """The number of new tokens of the block's row, or 0 for padding blocks."""
    block_token: Int[AnyArray, "blocks Q"]
    """The index of each query of the block among the T new tokens."""
    token_slot: Int[AnyArray, " T"]
    """The index of each new token among the flattened queries of all blocks."""
    windows_BN: Int[AnyArray, "B N"] | None = None
    """The pages in layers with a window, if these have a pool of their own."""

    def in_windows(self, slots_T: Int[Array, " T"], places_T: Int[Array, " T"], page: int) -> tuple[Any, Any]:
        """Return this metadata and the slots of the new tokens for a layer of the windows' pool.

        ``places_T`` are the tokens' positions in their rows.
        """
        decodes = not len(self.block_row)
        row_T = jnp.arange(len(slots_T)) if decodes else self.block_row[self.token_slot // QUERY_BLOCK]
        pages: Any = self.windows_BN
        slots = jnp.where(slots_T < 0, -1, pages[row_T, places_T // page] * page + places_T % page)
        return self._replace(pages_BN=pages), slots


class GatherMode(AttentionMode):
    """Our attention: each row gathers its own pages. It runs on any device with any page size."""

    @override
    def cache_layer(self, pool: MHATokenToKVPool, layer: RadixAttention, pages: int) -> jax.ShapeDtypeStruct:
        """Describe a layer [pages, page, K, 2, D]: keys and values alternate, and heads have the model's width.

        The library would pad the width of heads to a multiple of 128.
        """
        shape = (pages, pool.page_size, layer.kv_head_num, 2, layer.head_dim)
        sharding = NamedSharding(pool.mesh, CACHE_PARTITION)
        return jax.ShapeDtypeStruct(shape, bits_of(jnp.dtype(pool.dtype)), sharding=sharding)

    @override
    def prefill_metadata(
        self, columns: Columns, slots_bL: Int[np.ndarray, "b L"], windows_bN: Windows | None = None
    ) -> GatherMetadata:
        rows = len(columns["seq_lens"])
        blocks = block_metadata(self._pages(slots_bL, rows), columns["extend_lens"], len(columns["input_ids"]))
        return blocks._replace(windows_BN=None if windows_bN is None else padded(windows_bN, rows))

    @override
    def launch_metadata(
        self, slots_bL: Int[np.ndarray, "b L"], ends_B: Int[np.ndarray, " B"], windows_bN: Windows | None = None
    ) -> GatherMetadata:
        """List the pages of each row. There are no blocks, because each row has one query per step."""
        pages, none = self._pages(slots_bL, len(ends_B)), np.zeros(0, np.int32)
        windows = None if windows_bN is None else padded(windows_bN, len(ends_B))
        return GatherMetadata(pages, none, none, none, np.zeros((0, QUERY_BLOCK), np.int32), none, windows)

    @override
    def at_step(self, metadata: Any, seq_lens_B: Int[Array, " B"]) -> GatherMetadata:
        """Return the same pages at every step; the backend reads only as many as the longest row has."""
        return metadata

    def _pages(self, slots_bL: Int[np.ndarray, "b L"], rows: int) -> Int[np.ndarray, "{rows} N"]:
        page = self._runner.page_size
        return padded(slots_bL[:, ::page] // page, rows)

    @override
    def backend(self, metadata: Any) -> "GatherAttention":
        return GatherAttention(metadata)


def block_metadata(
    pages_BN: Int[np.ndarray, "B N"], extend_lens_B: Int[np.ndarray, " B"], total_tokens: int
) -> GatherMetadata:
    """Split each row's new tokens into blocks of QUERY_BLOCK, at most ``total_tokens / QUERY_BLOCK + B`` of them."""
    most = -(-total_tokens // QUERY_BLOCK) + len(extend_lens_B)
    blocks = -(-most // BLOCKS_AT_ONCE) * BLOCKS_AT_ONCE
    row, start, length = (np.zeros(blocks, np.int32) for _ in range(3))
    token = np.zeros((blocks, QUERY_BLOCK), np.int32)
    slot = np.zeros(total_tokens, np.int32)
    per_row = -(-extend_lens_B // QUERY_BLOCK)
    used = int(per_row.sum())
    row[:used] = np.repeat(np.arange(len(extend_lens_B)), per_row)
    first_block = np.cumsum(per_row) - per_row
    start[:used] = (np.arange(used) - first_block[row[:used]]) * QUERY_BLOCK
    length[:used] = extend_lens_B[row[:used]]
    first_token = np.cumsum(extend_lens_B) - extend_lens_B
    token[:used] = np.minimum(
        first_token[row[:used], None] + start[:used, None] + np.arange(QUERY_BLOCK), total_tokens - 1
    )
    token_row = np.repeat(np.arange(len(extend_lens_B)), extend_lens_B)
    offset = np.arange(len(token_row)) - first_token[token_row]
    slot[: len(token_row)] = first_block[token_row] * QUERY_BLOCK + offset
    return GatherMetadata(pages_BN, row, start, length, token, slot)


@dataclass(frozen=True)
class Scoring:
    """How a layer scores keys: the product q k times ``scale``, then the soft cap, then a softmax over visible keys."""

    scale: float
    window: int | None = None
    """A query sees its own token and the ``window - 1`` tokens before; with None, it sees all tokens before."""
    soft_cap: float | None = None
    """Scores x become soft_cap * tanh(x / soft_cap)."""


@dataclass(frozen=True)
class GatherAttention:
    """Replaces sglang-jax's ``AttentionBackend`` in a forward batch; it is built inside the traced step."""

    metadata: GatherMetadata

    @staticmethod
    def get_max_running_reqests(max_context_len: int, page_size: int) -> int:
        """Set no limit on how many rows run at once. The spelling is the library's."""
        return 1 << 20

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        token_to_kv_pool: MHATokenToKVPool,
    ) -> tuple[Float[Array, "T H*D"], Shaped[Array, "pages page K 2 D"]]:
        """Write the new keys and values into the cache, attend, and return the output and the layer's new cache.

        Heads are sharded over the axis "tensor" of the mesh, and each device computes the attention of its own heads.
        """
        decodes = forward_batch.forward_mode == ForwardMode.DECODE
        lengths = forward_batch.seq_lens if decodes else forward_batch.extend_prefix_lens
        scoring = Scoring(layer.scaling, layer.sliding_window_size, layer.logit_cap)
        paged = token_to_kv_pool.get_fused_kv_buffer(layer.layer_id)
        metadata, slots = self.metadata, forward_batch.out_cache_loc
        if metadata.windows_BN is not None and scoring.window is not None:
            metadata, slots = metadata.in_windows(slots, forward_batch.positions, paged.shape[1])

        def attend_own_heads(q, k, v, paged, slots, lengths, metadata):
            paged = write_cache(paged, slots, k, v)
            grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
            if decodes:
                out = decode_attention(grouped, paged, metadata.pages_BN, lengths, scoring)
            else:
                out = prefill_attention(grouped, paged, metadata, lengths, scoring)
            return out.reshape(len(q), -1), paged

        heads, replicated = P("data", "tensor", None), P()
        specs = (heads, heads, heads, CACHE_PARTITION, replicated, replicated, replicated)
        attend_sharded = jax.shard_map(
            attend_own_heads, in_specs=specs, out_specs=(P("data", "tensor"), CACHE_PARTITION), check_vma=False
        )
        q, k, v = (jax.sharding.reshard(x, heads) for x in (q, k, v))  # a single head arrives split by width
        return attend_sharded(q, k, v, paged, slots, lengths, metadata)


def write_cache(
    paged: Shaped[Array, "pages page K 2 D"],
    slots_T: Int[Array, " T"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
) -> Shaped[Array, "pages page K 2 D"]:
    """Write keys and values of new tokens into their cache slots; tokens with slot -1 are dropped.

    The cache is not reshaped: with pages of one token, XLA copied the whole cache for a reshape.
    """
    page_T, offset_T = jnp.where(slots_T >= 0, slots_T // paged.shape[1], len(paged)), slots_T % paged.shape[1]
    return paged.at[page_T, offset_T].set(encode(jnp.stack([k, v], axis=2), paged.dtype), mode="drop")


def decode_attention(
    q: Float[Array, "B K G D"],
    paged: Shaped[Array, "pages page K 2 D"],
    pages_BN: Int[Array, "B N"],
    seq_lens_B: Int[Array, " B"],
    scoring: Scoring,
) -> Float[Array, "B K G D"]:
    """Attend with one query per row to the row's first ``seq_lens`` cached tokens."""
    groups = DECODE_GROUPS if q.shape[0] % DECODE_GROUPS == 0 else 1
    queries, pages, lens = (jnp.split(array, groups) for array in (q[:, None], pages_BN, seq_lens_B[:, None]))
    out = [paged_attention(*part, paged, scoring) for part in zip(queries, pages, lens, strict=True)]
    return jnp.concatenate(out)[:, 0]


def prefill_attention(
    q: Float[Array, "T K G D"],
    paged: Shaped[Array, "pages page K 2 D"],
    metadata: GatherMetadata,
    prefix_lens_B: Int[Array, " B"],
    scoring: Scoring,
) -> Float[Array, "T K G D"]:
    """Attend causally: each new token to its row's cached prefix and to the row's new tokens up to itself."""

    def attend(blocks: tuple[Array, Array, Array, Array]) -> Array:
        row, start, token, length = blocks
        offset_RQ = jnp.arange(QUERY_BLOCK) + start[:, None]
        visible_RQ = jnp.where(offset_RQ < length[:, None], prefix_lens_B[row][:, None] + offset_RQ + 1, 0)
        return paged_attention(q[token], metadata.pages_BN[row], visible_RQ, paged, scoring)

    blocks = (metadata.block_row, metadata.block_start, metadata.block_token, metadata.block_length)
    grouped = jax.tree.map(lambda a: a.reshape(-1, BLOCKS_AT_ONCE, *a.shape[1:]), blocks)
    out = jax.lax.map(attend, grouped)
    return out.reshape(-1, *q.shape[1:])[metadata.token_slot]


def paged_attention(
    q: Float[Array, "R Q K G D"],
    pages_RN: Int[Array, "R N"],
    visible_RQ: Int[Array, "R Q"],
    paged: Shaped[Array, "pages page K 2 D"],
    scoring: Scoring,
) -> Float[Array, "R Q K G D"]:
    """Attend with each query to the first ``visible`` tokens of its row's pages, with scores and softmax in float32.

    A query with a window sees the last ``window`` of these tokens; chunks before the first window are not read. The
    result of a query that sees nothing (padding) is zero.
    """
    _, page_size, heads, *_ = paged.shape
    pages_per_chunk = max(1, CHUNK_TOKENS // page_size)
    chunk = pages_per_chunk * page_size
    pages_RN = jnp.pad(pages_RN, ((0, 0), (0, -pages_RN.shape[1] % pages_per_chunk)))

    def attend_chunk(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, mass, out = carry
        pages = jax.lax.dynamic_slice_in_dim(pages_RN, index * pages_per_chunk, pages_per_chunk, axis=1)
        # two gathers, because a CPU would copy keys and values out of one gather of both, a sixth of a decode step
        keys, values = (decode(paged[pages, :, :, part]).reshape(len(pages), chunk, heads, -1) for part in range(2))
        scores = _seen_scores(q, keys, index * chunk + jnp.arange(chunk), visible_RQ, scoring)
        # a query that sees no key yet has the peak MASKED and weights of 1; its first key erases them: shrink is 0
        new_peak = jnp.maximum(peak, scores.max(-1))
        shrink, weights = jnp.exp(peak - new_peak), jnp.exp(scores - new_peak[..., None])
        out = out * shrink[..., None] + _mix(weights, values)
        return new_peak, mass * shrink + weights.sum(-1), out

    start: Any = (
        jnp.full(q.shape[:-1], MASKED, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    first, last = _chunks(visible_RQ, scoring.window, chunk)
    _, mass, out = jax.lax.fori_loop(first, last, attend_chunk, start)
    sees_any = (visible_RQ > 0)[..., None, None, None]
    return (sees_any * out / jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)[..., None]).astype(q.dtype)


def _chunks(visible_RQ: Int[Array, "R Q"], window: int | None, chunk: int) -> tuple[Any, Any]:
    """Return the indices of the first chunk that any query sees, and of the chunk after the last one."""
    end = -(-jnp.max(visible_RQ) // chunk)
    if window is None:
        return 0, end
    least = jnp.min(jnp.where(visible_RQ > 0, visible_RQ, jnp.iinfo(visible_RQ.dtype).max))
    return jnp.minimum(jnp.maximum(least - window, 0) // chunk, end), end


def _seen_scores(
    q: Float[Array, "R Q K G D"],
    keys: Float[Array, "R C K D"],
    position_C: Int[Array, " C"],
    visible_RQ: Int[Array, "R Q"],
    scoring: Scoring,
) -> Float[Array, "R Q K G C"]:
    """Score the keys at these positions; a key that a query does not see scores MASKED."""
    seen = position_C < visible_RQ[..., None]
    if scoring.window is not None:
        seen &= position_C >= visible_RQ[..., None] - scoring.window
    scores = _scores(q, keys) * scoring.scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
    return jnp.where(seen[:, :, None, None], scores, MASKED)


def _scores(q: Float[Array, "R Q K G D"], keys: Float[Array, "R C K D"]) -> Float[Array, "R Q K G C"]:
    if q.shape[1] == 1:  # sums of products, because a CPU runs many tiny matrix products one after the other
        products = q[:, 0, None].astype(jnp.float32) * keys[:, :, :, None].astype(jnp.float32)  # R C K G D
        return jnp.moveaxis(products.sum(-1), 1, -1)[:, None]
    return jnp.einsum("rqkgd,rckd->rqkgc", q, keys, preferred_element_type=jnp.float32)


def _mix(weights: Float[Array, "R Q K G C"], values: Float[Array, "R C K D"]) -> Float[Array, "R Q K G D"]:
    if weights.shape[1] == 1:
        by_token = jnp.moveaxis(weights[:, 0], -1, 1)[..., None]  # R C K G 1
        return (by_token * values[:, :, :, None].astype(jnp.float32)).sum(1)[:, None]
    return jnp.einsum("rqkgc,rckd->rqkgd", weights, values, preferred_element_type=jnp.float32)
