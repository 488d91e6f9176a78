"""Paged attention for any device, behind sglang-jax's backend interface: each row gathers its own pages.

The library's native attention scores every query against every row's cache (rows x rows x length) and is wrong for
pages above one token. This one costs rows x length, for any page size, with the same numbers: products in the compute
type, softmax in float32.

Suffixes: B rows, L padded length in tokens, N pages (L / page size), T new tokens of all rows, Q queries of a block,
K key-value heads, G query heads per key-value head, D head width, S tokens of the cache.

Queries of a prefill are cut into blocks of QUERY_BLOCK tokens of one row, so that rows of very different lengths (a
whole prompt beside rows that found theirs in the cache) cost what they are long.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

QUERY_BLOCK = 16
BLOCKS_AT_ONCE = 8


class GatherMetadata(NamedTuple):
    """Where the rows' tokens lie; the block fields are used by prefill only."""

    pages_BN: Int[Array, "B N"]
    block_row: Int[Array, " blocks"]
    block_start: Int[Array, " blocks"]
    """First query of the block, counted from the row's first new token."""
    block_token: Int[Array, "blocks Q"]
    """Index among the T new tokens of each query of the block."""
    token_slot: Int[Array, " T"]
    """Index of each new token among the blocks' queries, flattened."""


def block_metadata(
    pages_BN: Int[np.ndarray, "B N"], extend_lens_B: Int[np.ndarray, " B"], total_tokens: int
) -> GatherMetadata:
    """Cut each row's new tokens into blocks of QUERY_BLOCK; padded to ``total_tokens / QUERY_BLOCK + B`` blocks."""
    blocks = -(-total_tokens // QUERY_BLOCK) + len(extend_lens_B)
    row, start = np.zeros(blocks, np.int32), np.zeros(blocks, np.int32)
    token = np.zeros((blocks, QUERY_BLOCK), np.int32)
    slot = np.zeros(total_tokens, np.int32)
    per_row = -(-extend_lens_B // QUERY_BLOCK)
    used = int(per_row.sum())
    row[:used] = np.repeat(np.arange(len(extend_lens_B)), per_row)
    first_block = np.cumsum(per_row) - per_row
    start[:used] = (np.arange(used) - first_block[row[:used]]) * QUERY_BLOCK
    first_token = np.cumsum(extend_lens_B) - extend_lens_B
    token[:used] = np.minimum(
        first_token[row[:used], None] + start[:used, None] + np.arange(QUERY_BLOCK), total_tokens - 1
    )
    token_row = np.repeat(np.arange(len(extend_lens_B)), extend_lens_B)
    offset = np.arange(len(token_row)) - first_token[token_row]
    slot[: len(token_row)] = first_block[token_row] * QUERY_BLOCK + offset
    return GatherMetadata(pages_BN, row, start, token, slot)


def decode_metadata(pages_BN: Int[np.ndarray, "B N"]) -> GatherMetadata:
    """Metadata of a decode step: one query per row, no blocks."""
    none = np.zeros(0, np.int32)
    return GatherMetadata(pages_BN, none, none, np.zeros((0, QUERY_BLOCK), np.int32), none)


@dataclass(frozen=True)
class GatherAttention:
    """What a forward batch needs of sglang-jax's ``AttentionBackend``, built inside the traced step."""

    page_size: int
    metadata: GatherMetadata

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        token_to_kv_pool: MHATokenToKVPool,
    ) -> tuple[Float[Array, "T HD"], Float[Array, "S 2K D"]]:
        """Write the new keys and values into the cache, attend, and return the output and the layer's new cache."""
        cache = token_to_kv_pool.set_kv_buffer_legacy(layer.layer_id, forward_batch.out_cache_loc, k, v)
        paged = cache.reshape(-1, self.page_size, layer.kv_head_num, 2, layer.head_dim)
        grouped = q.reshape(q.shape[0], layer.kv_head_num, -1, layer.head_dim)
        if forward_batch.forward_mode == ForwardMode.DECODE:
            out = decode_attention(grouped, paged, self.metadata.pages_BN, forward_batch.seq_lens, layer.scaling)
        else:
            prefix = forward_batch.extend_prefix_lens
            assert prefix is not None
            out = prefill_attention(grouped, paged, self.metadata, prefix, layer.scaling)
        return out.reshape(q.shape[0], -1), cache


def decode_attention(
    q: Float[Array, "B K G D"],
    paged: Float[Array, "pages page K 2 D"],
    pages_BN: Int[Array, "B N"],
    seq_lens_B: Int[Array, " B"],
    scale: float,
) -> Float[Array, "B K G D"]:
    """One query per row against the row's first ``seq_lens`` cached tokens."""
    rows = paged[pages_BN]
    rows = rows.reshape(rows.shape[0], -1, *rows.shape[3:])  # B L K 2 D
    keys, values = rows[..., 0, :], rows[..., 1, :]
    scores = jnp.einsum("bkgd,blkd->bkgl", q, keys, preferred_element_type=jnp.float32) * scale
    visible_BL = jnp.arange(rows.shape[1]) < seq_lens_B[:, None]
    weights = _softmax(scores, visible_BL[:, None, None, :]).astype(q.dtype)
    return jnp.einsum("bkgl,blkd->bkgd", weights, values)


def prefill_attention(
    q: Float[Array, "T K G D"],
    paged: Float[Array, "pages page K 2 D"],
    metadata: GatherMetadata,
    prefix_lens_B: Int[Array, " B"],
    scale: float,
) -> Float[Array, "T K G D"]:
    """Causal attention of new tokens to their row's cached prefix and to each other."""

    def attend_block(block: tuple[Array, Array, Array]) -> Array:
        row, start, token = block
        cached = paged[metadata.pages_BN[row]]
        cached = cached.reshape(-1, *cached.shape[2:])  # L K 2 D
        scores = jnp.einsum("qkgd,lkd->kgql", q[token], cached[..., 0, :], preferred_element_type=jnp.float32) * scale
        position_Q = prefix_lens_B[row] + start + jnp.arange(QUERY_BLOCK)
        visible_QL = jnp.arange(cached.shape[0]) <= position_Q[:, None]
        weights = _softmax(scores, visible_QL).astype(q.dtype)
        return jnp.einsum("kgql,lkd->qkgd", weights, cached[..., 1, :])

    blocks = (metadata.block_row, metadata.block_start, metadata.block_token)
    out = jax.lax.map(attend_block, blocks, batch_size=BLOCKS_AT_ONCE)
    return out.reshape(-1, *out.shape[2:])[metadata.token_slot]


def _softmax(scores: Array, visible: Array) -> Array:
    return jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
