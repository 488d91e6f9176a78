"""sglang-jax's flash attention for TPUs (ragged paged attention, version 3), and the sizes of its blocks.

A decode step runs the kernel for one query per row (DECODE), and a prefill runs it for other rows (MIXED). The kernel
and the cache pad the width of heads to a multiple of 128.

The kernel reads a row's cache in blocks of keys and values, from HBM into two buffers in VMEM. It computes on one part
of a block at a time, and skips parts beyond the row's end. The sizes for decode steps were chosen by counting bundles
(cycles) in programs compiled for v5e, v5p and v6e, with 1, 2 and 8 key-value heads per device and pages of 64 tokens:

- One part of 512 keys takes fewer bundles than two of 256: 328, 429 and 1,087 on v5e for 1, 2 and 8 heads, and not 466,
  540 and 1,308. Parts of 1,024 keys save little more, and compute more beyond a row's end.
- A block of 1,024 keys takes about 400 bundles besides its parts, and 8 more for each further page. With blocks of
  2,048 keys of 2 heads in parts of 512, v6e processes 1.7 TB/s, more than its memory's 1.64 TB/s; with blocks of 1,024
  keys in parts of 256, it processes 1.3 TB/s.
- Bundles for a page are also spent where the row has ended, so a block of more than 1,024 keys has at most 32 pages.
- Buffers larger than half of the kernel's VMEM, such as 1,024 keys of 8 heads on v4, do not compile.

Suffixes: b rows of the batch, B rows (padded), L context, T new tokens of all rows, H query heads, K
key-value heads, D head width.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int
from sgl_jax.srt.kernels.ragged_paged_attention.ragged_paged_attention_v3 import RpaCase
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention, FlashAttentionMetadata
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch

from tpu_grpo.engine.attention import FP8, AttentionMode, Columns, Windows, encode, padded
from tpu_grpo.engine.repairs import attention_of
from tpu_grpo.records.errors import ConfigError

PAGE_TABLE = 2**17
"""The most pages that all rows together may have. The table of the pages may take half of the 1 MiB of scalar memory.
With more pages, the library silently runs fewer rows at once."""
WITHOUT_FP8 = ("TPU v4",)
"""On these devices the kernel's products of float32 and float8 do not compile."""
PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""The page sizes that error messages suggest."""
Block = tuple[int, int, int, int]
"""(queries fetched, keys fetched, queries computed at once, keys computed at once), in tokens."""
MIB = 2**20
VMEM_BYTES = {
    "TPU v4": 8 * MIB,
    "TPU v5": 32 * MIB,
    "TPU v5p": 32 * MIB,
    "TPU v5 lite": 64 * MIB,
    "TPU v5e": 64 * MIB,
    "TPU v6 lite": 64 * MIB,
    "TPU v6e": 64 * MIB,
    "TPU7x": 32 * MIB,
}
"""The VMEM that the kernel may use, by jax's name of the device: half of the device's VMEM, as in the library."""
LANES = 128
DECODE_KEYS, DECODE_KEYS_AT_ONCE = 2048, 512
DECODE_PAGES = 32
"""The most pages of a decode block of more than 1,024 keys."""
PREFILL_QUERIES, PREFILL_KEYS, PREFILL_KEYS_AT_ONCE = 32, 512, 256


class FlashMode(AttentionMode):
    """sglang-jax's Pallas kernel, which runs on TPUs only. It writes new keys and values at the end of each row."""

    @override
    def cache_layer(self, pool: MHATokenToKVPool, layer: RadixAttention, pages: int) -> jax.ShapeDtypeStruct:
        """Describe a layer as the library does.

        It pads the width of heads to a multiple of 128, and the number of heads to fill 32-bit words.
        """
        packing, tensor = 4 // np.dtype(pool.dtype).itemsize, pool.mesh.shape["tensor"]
        if pool.dtype == FP8:
            device = pool.mesh.devices.flat[0]
            check_fp8(layer.kv_head_num // tensor, jnp.dtype(self._runner.dtype), device.device_kind)
        words, width = tensor * -(-2 * layer.kv_head_num // tensor // packing), -(-layer.head_dim // LANES) * LANES
        shape = (pages, pool.page_size, words, packing, width)
        sharding = NamedSharding(pool.mesh, P("data", None, "tensor", None, None))
        return jax.ShapeDtypeStruct(shape, pool.dtype, sharding=sharding)

    @override
    def prefill_metadata(
        self, columns: Columns, slots_bL: Int[np.ndarray, "b L"], windows_bN: Windows | None = None
    ) -> FlashAttentionMetadata:
        """Compute the library's metadata on the host; it is transferred to the devices with the step's other inputs."""
        rows = int(np.sum(columns["seq_lens"] > 0))
        return self._metadata(columns["seq_lens"], columns["extend_lens"], slots_bL, windows_bN, (0, rows, rows))

    @override
    def launch_metadata(
        self, slots_bL: Int[np.ndarray, "b L"], ends_B: Int[np.ndarray, " B"], windows_bN: Windows | None = None
    ) -> Any:
        """Compute the library's metadata for the rows' greatest possible lengths. Pages stay the same during a launch.

        Padding rows between other rows get page 0, which no request owns; ``at_step`` gives page 0 to ended rows.
        """
        rows = int(np.max(np.nonzero(ends_B)[0], initial=-1)) + 1
        ends_B = np.where((np.arange(len(ends_B)) < rows) & (ends_B == 0), 1, ends_B).astype(np.int32)
        return self._metadata(ends_B, np.ones_like(ends_B), slots_bL, windows_bN, (rows, rows, rows))

    @override
    def at_step(self, metadata: Any, seq_lens_B: Int[Array, " B"]) -> FlashAttentionMetadata:
        """Set the rows' lengths at this step. Ended rows become rows of one token in page 0, which no request owns.

        An ended row needs a token because the kernel writes a key and a value for every row in ``distribution``.
        """
        rows_B = jnp.arange(len(seq_lens_B))
        ended_B = (rows_B < metadata.distribution[0]) & (seq_lens_B == 0)
        first_B, nowhere = metadata.cu_kv_lens[:-1] // self._runner.page_size, metadata.page_indices.size
        first_B = jnp.where(ended_B, first_B, nowhere)
        tables = metadata.page_indices, metadata.swa_page_indices
        pages, windows = jax.tree.map(lambda table: table.at[first_B].set(0, mode="drop"), tables)
        lengths = jnp.where(ended_B, 1, seq_lens_B)
        return replace(metadata, page_indices=pages, swa_page_indices=windows, seq_lens=lengths)

    def _metadata(
        self,
        seq_lens_B: Int[np.ndarray, " B"],
        new_B: Int[np.ndarray, " B"],
        slots_bL: Int[np.ndarray, "b L"],
        windows_bN: Windows | None,
        ends: tuple[int, int, int],
    ) -> FlashAttentionMetadata:
        """Build the library's metadata; ``ends`` are the row indices at which decode, prefill and mixed rows end.

        The pages of all rows are concatenated, and padded with zeros to an array of fixed size.
        """
        page = self._runner.page_size
        pages_B = -(-seq_lens_B // page)
        table_bN = slots_bL[:, ::page] // page
        taken_bN = np.arange(table_bN.shape[1]) < pages_B[: len(table_bN), None]
        places = len(seq_lens_B) * table_bN.shape[1]
        arrays: dict[str, Any] = {
            "cu_q_lens": _starts(new_B),
            "cu_kv_lens": _starts(pages_B * page),
            "page_indices": padded(table_bN[taken_bN], places),
            "swa_page_indices": None if windows_bN is None else padded(windows_bN[taken_bN], places),
            "seq_lens": seq_lens_B,
            "distribution": np.array(ends, np.int32),
        }
        return FlashAttentionMetadata(**arrays)

    @override
    def backend(self, metadata: Any) -> "BlockedFlashAttention":
        """Make a new backend that holds the metadata."""
        runner = self._runner
        heads = (runner.num_attn_heads, runner.num_kv_heads, runner.model_config.head_dim)
        backend = BlockedFlashAttention(*heads, page_size=runner.page_size, mesh=runner.mesh)
        backend.forward_metadata = metadata
        return backend


def _starts(lengths_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B+1"]:
    """Return the index of each row's first token in the concatenation of all rows, and the index after the last row."""
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths_B, dtype=np.int32)])


class BlockedFlashAttention(FlashAttention):
    """FlashAttention with our block sizes, and with float32 queries.

    The kernel keeps its running maxima, sums and outputs in the type of the queries. With bfloat16, rounding these at
    every block of keys has 2.6 to 4.6 times the error of rounding the output once. Float32 queries take no extra
    cycles.
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
        """Attend, and write the new keys and values into the cache; each device runs the kernel with its own heads.

        Returns the output [T, H D] and the layer's cache.
        """
        cache = token_to_kv_pool.get_fused_kv_buffer(layer.layer_id)
        k, v = (encode(new, cache.dtype) for new in (k, v))
        by_head, cached, by_row = P("data", "tensor", None), P("data", None, "tensor", None, None), P("data")
        tensor, given_metadata = self.mesh.shape["tensor"], self.forward_metadata
        windows = given_metadata.swa_page_indices
        # page_indices has as many places for each row, see FlashMode._metadata
        blocks = choose_blocks(
            self.mesh.devices.flat[0].device_kind,
            kv_heads=layer.kv_head_num // tensor,
            head_dim=cache.shape[-1],
            page_size=self.page_size,
            context_tokens=len(given_metadata.page_indices) // len(given_metadata.seq_lens) * self.page_size,
            dtype=cache.dtype,
        )

        attend_own_heads = functools.partial(
            attention_of(RpaCase.DECODE if forward_batch.forward_mode.is_decode() else RpaCase.MIXED),
            custom_mask=None,
            sm_scale=layer.scaling,
            sliding_window=layer.sliding_window_size,
            soft_cap=layer.logit_cap,
            d_block_sizes=blocks.decode,
            m_block_sizes=blocks.prefill,
            vmem_limit_bytes=blocks.vmem_bytes,
        )
        kernel_metadata = (
            given_metadata.seq_lens,
            given_metadata.page_indices if windows is None or layer.sliding_window_size is None else windows,
            given_metadata.cu_q_lens,
            given_metadata.cu_kv_lens,
            given_metadata.distribution,
        )
        attend: Any = jax.shard_map(
            attend_own_heads,
            in_specs=(by_head, by_head, by_head, cached, *(by_row for _ in kernel_metadata)),
            out_specs=(by_head, cached),
            check_vma=False,
        )
        # a single head arrives split by width
        queries, k, v = (jax.sharding.reshard(x, by_head) for x in (q.astype(jnp.float32), k, v))
        resharded = (jax.sharding.reshard(array, by_row) for array in kernel_metadata)
        output, cache = attend(queries, k, v, cache, *resharded)
        return output.reshape(len(q), -1).astype(q.dtype), cache


# --- blocks, and what the kernel cannot take --------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The kernel's block sizes and limit of VMEM for one engine."""

    decode: Block
    prefill: Block
    vmem_bytes: int


def choose_blocks(
    device_kind: str, *, kv_heads: int, head_dim: int, page_size: int, context_tokens: int, dtype: np.dtype
) -> Blocks:
    """Choose blocks of whole pages, up to one row's context; ``kv_heads`` is the number on one device.

    Raises:
        ConfigError: if VMEM_BYTES does not list the kind of device.
    """
    vmem_bytes = VMEM_BYTES.get(device_kind)
    if vmem_bytes is None:
        raise ConfigError(
            f"rollout.attention=flash needs a TPU out of {sorted(VMEM_BYTES)}, got {device_kind}; use gather on others"
        )
    packing = 4 // np.dtype(dtype).itemsize  # keys and values share words of 32 bits
    words = -(-2 * kv_heads // packing)
    heads = words * packing + max(2, packing)  # with the gap that the kernel leaves against bank conflicts
    fitting = vmem_bytes // 2 // (2 * heads * head_dim * np.dtype(dtype).itemsize)

    def sizes(queries: int, most_keys: int, most_at_once: int) -> Block:
        at_once = max(1, min(most_at_once, 1 << (fitting.bit_length() - 1)) // page_size) * page_size
        parts = min(most_keys, fitting, -(-context_tokens // at_once) * at_once) // at_once
        return queries, max(1, parts) * at_once, queries, at_once

    decode_keys = min(DECODE_KEYS, max(1024, DECODE_PAGES * page_size))
    prefill = sizes(PREFILL_QUERIES, PREFILL_KEYS, PREFILL_KEYS_AT_ONCE)
    return Blocks(sizes(1, decode_keys, DECODE_KEYS_AT_ONCE), prefill, vmem_bytes)


def check_pages(*, rows: int, context_tokens: int, page_size: int) -> None:
    """Refuse a page size that the kernel does not support, or more pages than its page table holds.

    Raises:
        ConfigError: in either case; the message names sizes that fit.
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
    """Refuse an 8-bit cache that the devices cannot read, or that would save no memory.

    The kernel packs rows (a key or a value of one head each) into words of 32 bits, and pads them to whole words.
    ``kv_heads`` is the number on one device; ``model_dtype`` is the type of the cache without fp8.

    Raises:
        ConfigError: in either case.
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
