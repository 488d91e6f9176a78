"""sglang-jax's flash attention for TPUs (ragged paged attention, version 3).

A decode step runs in the kernel's decode form, whose queries are one token per row, and a prefill in its mixed form.
The kernel pads heads to multiples of 128 numbers, and so does the cache.

Suffixes: T new tokens of all rows, H query heads, K key-value heads, D head width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from sgl_jax.srt.kernels.ragged_paged_attention.ragged_paged_attention_v3 import ragged_paged_attention
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch

from tpu_grpo.engine.flash_blocks import choose_blocks
from tpu_grpo.engine.kv_formats import encode
from tpu_grpo.records.errors import ConfigError

PAGE_TABLE = 2**17
"""The most pages that all rows may have together. The library lets their table take half of the 1 MiB of scalar memory,
and silently runs fewer rows at once beyond that."""
WITHOUT_FP8 = ("TPU v4",)
"""There the compiler refuses the kernel's products of float32 and float8."""
PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""The page sizes that are suggested."""


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


def check_fp8(kv_heads: int, model_dtype: jnp.dtype, device_kind: str) -> None:
    """Refuse a cache of 8 bits that the devices cannot read, or that would be no smaller.

    The kernel packs rows, a key or a value of a head each, into words of 32 bits, and pads them to whole words.

    Args:
        kv_heads: key-value heads of a device.
        model_dtype: the type that a cache would have otherwise.
        device_kind: jax's name of the devices.

    Raises:
        ConfigError: if they cannot, or if it would not.
    """
    if device_kind in WITHOUT_FP8:
        raise ConfigError(
            f"rollout.kv_dtype=fp8 with rollout.attention=flash needs a TPU from v5 on, got {device_kind}, for which "
            "the kernel does not compile; use rollout.kv_dtype=auto"
        )
    if -(-2 * kv_heads // 4) * 4 >= 2 * kv_heads * model_dtype.itemsize:
        raise ConfigError(
            f"rollout.kv_dtype=fp8 with rollout.attention=flash needs two key-value heads on a device, whose rows fill "
            f"a word of 32 bits, got {kv_heads}, which takes as much memory as in {model_dtype}; lower "
            "meshes.sampler.tensor, or use rollout.kv_dtype=auto"
        )


class BlockedFlashAttention(FlashAttention):
    """FlashAttention with our block sizes, and with float32 queries.

    The kernel keeps its running maxima, sums and outputs in the type of the queries, and with bfloat16 rounds them at
    every block of keys: 2.6 to 4.6 times the error of rounding the output once. Float32 queries take no more bundles.
    """

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        token_to_kv_pool: MHATokenToKVPool,
        **_: Any,
    ) -> tuple[Float[Array, "T heads"], Array]:
        """Attend, and write the new keys and values into the cache.

        Returns:
            The output [T, H D] and the layer's cache.
        """
        cache = token_to_kv_pool.get_fused_kv_buffer(layer.layer_id)
        k, v = (encode(new, cache.dtype) for new in (k, v))
        output, cache = self._attend(q.astype(jnp.float32), k, v, cache, layer)
        return output.reshape(len(q), -1).astype(q.dtype), cache

    def _attend(self, q: Array, k: Array, v: Array, cache: Array, layer: RadixAttention) -> tuple[Array, Array]:
        """Run the kernel on each device with the heads that it has."""
        by_head, cached, by_row = P("data", "tensor", None), P("data", None, "tensor", None, None), P("data")
        tensor = self.mesh.shape["tensor"]
        blocks = choose_blocks(
            self.mesh.devices.flat[0].device_kind,
            kv_heads=self.num_kv_heads // tensor,
            head_dim=cache.shape[-1],
            page_size=self.page_size,
            context_tokens=self.metadata_context,
            dtype=cache.dtype,
        )

        def attend_own_heads(q: Array, k: Array, v: Array, cache: Array, *metadata: Array) -> Any:
            return ragged_paged_attention(
                q,
                k,
                v,
                cache,
                *metadata,
                None,
                sm_scale=layer.scaling,
                sliding_window=layer.sliding_window_size,
                soft_cap=layer.logit_cap,
                d_block_sizes=blocks.decode,
                m_block_sizes=blocks.prefill,
                vmem_limit_bytes=blocks.vmem_bytes,
            )

        found: Any = self.forward_metadata
        metadata = (found.seq_lens, found.page_indices, found.cu_q_lens, found.cu_kv_lens, found.distribution)
        attend: Any = jax.shard_map(
            attend_own_heads,
            in_specs=(by_head, by_head, by_head, cached, *(by_row for _ in metadata)),
            out_specs=(by_head, cached),
            check_vma=False,
        )
        q, k, v = (jax.sharding.reshard(x, by_head) for x in (q, k, v))  # a single head is split by width as it comes
        return attend(q, k, v, cache, *(jax.sharding.reshard(array, by_row) for array in metadata))

    @property
    def metadata_context(self) -> int:
        """The tokens of the longest row that the step's table of pages has room for."""
        found = self.forward_metadata
        return len(found.page_indices) // len(found.seq_lens) * self.page_size
