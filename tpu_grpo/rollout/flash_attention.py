"""sglang-jax's flash attention for heads of any width: its kernel takes multiples of 128, so heads are padded.

Zeros appended to queries and keys add nothing to their products, and what belongs to zeros appended to values is cut
off again. The cache keeps padded heads.

Suffixes: T new tokens of all rows, H heads of any kind, D head width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention
from sgl_jax.srt.layers.attention.native_backend import NativeAttention
from sgl_jax.srt.layers.radix_attention import RadixAttention

from tpu_grpo.errors import ConfigError

KERNEL_WIDTH = 128
PAGE_TABLE = 2**17
"""The most pages that all rows may have together. The library lets their table take half of the 1 MiB of scalar memory,
and silently runs fewer rows at once beyond that."""
PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""The page sizes that are suggested. A block of the kernel holds 512 tokens on v4 and 1024 elsewhere."""


def kernel_width(head_dim: int) -> int:
    """Round a head width up to one that the kernel takes: ``kernel_width(64) == 128``."""
    return -(-head_dim // KERNEL_WIDTH) * KERNEL_WIDTH


def check_pages(*, rows: int, context_tokens: int, page_size: int) -> None:
    """Refuse pages that the kernel cannot take, or more of them than its table holds.

    Raises:
        ConfigError: if it cannot; the message names sizes that fit.
    """
    if page_size > PAGES[-1]:
        raise ConfigError(
            f"rollout.page_size must be at most {PAGES[-1]} with rollout.attention=flash, whose blocks hold a page, "
            f"got {page_size}; use 64 or 128"
        )
    pages = -(-context_tokens // page_size)
    if rows * pages > PAGE_TABLE:
        fitting = next((size for size in PAGES if rows * -(-context_tokens // size) <= PAGE_TABLE), None)
        larger = f"raise rollout.page_size to {fitting}, or " if fitting else ""
        raise ConfigError(
            f"rollout.max_running_requests x pages of a row must be at most {PAGE_TABLE} with rollout.attention=flash, "
            f"which keeps their table in the chip's scalar memory, got {rows} x {pages} (pages of {page_size} for "
            f"{context_tokens} tokens); {larger}lower rollout.max_running_requests to {PAGE_TABLE // pages}"
        )


class PaddedFlashAttention(FlashAttention):
    """FlashAttention that is built for the kernel's head width and called with the model's."""

    def __call__(
        self, q: Array, k: Array, v: Array, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> tuple[Float[Array, "T HD"], Array]:
        """Attend with padded heads; returns the output and the updated cache, as the library's class does."""
        padding = ((0, 0), (0, 0), (0, self.head_dim - layer.head_dim))
        q, k, v = (jnp.pad(heads_THD, padding) for heads_THD in (q, k, v))
        output, cache = super().__call__(q, k, v, layer, *args, **kwargs)
        return cut_heads(output, self.head_dim, layer.head_dim), cache


class CutNativeAttention(NativeAttention):
    """NativeAttention, which pads heads as the cache does, with outputs as wide as the model's heads."""

    def __call__(
        self, q: Array, k: Array, v: Array, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> tuple[Float[Array, "T HD"], Array]:
        """Attend; returns the output and the updated cache, as the library's class does."""
        output, cache = super().__call__(q, k, v, layer, *args, **kwargs)
        return cut_heads(output, cache.shape[-1], layer.head_dim), cache


def cut_heads(heads: Float[Array, "T H*padded"], padded: int, width: int) -> Float[Array, "T H*width"]:
    """Keep the first ``width`` numbers of every head of ``padded``; heads stay sharded as they are."""

    def cut(own_heads: Array) -> Array:
        return own_heads.reshape(len(own_heads), -1, padded)[..., :width].reshape(len(own_heads), -1)

    by_head = P("data", "tensor")
    return jax.shard_map(cut, in_specs=by_head, out_specs=by_head)(jax.sharding.reshard(heads, by_head))
