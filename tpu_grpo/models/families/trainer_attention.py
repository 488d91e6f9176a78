"""The trainer's attention for all families: dot attention, or flash attention (splash, a Pallas kernel of jax) on TPUs.

Flash attention works on square blocks of a multiple of 128 tokens, so rows are padded to whole blocks.
For every head, dot attention stores the scores of all pairs of tokens. Flash attention stores none. For a block of
queries, it skips blocks of keys that come later, are in other sequences of the packed row, or lie before the window.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from tpu_grpo.records.errors import ConfigError

LANES = 128
"""Block sizes are multiples of this number; head widths are padded to a multiple of it."""


def flash_block(
    name: Literal["auto", "flash", "dot"], platform: str, row_tokens: int, head_width: int = LANES
) -> int | None:
    """Return flash attention's block size in tokens, for rows of ``row_tokens`` tokens, or None for dot attention.

    A row is a prompt and a completion. ``platform`` (tpu, cpu, gpu) is that of the trainer's devices.

    Raises:
        ConfigError: for flash without a TPU.
    """
    if name == "flash" and platform != "tpu":
        raise ConfigError(
            f"model.attention=flash needs a TPU, the trainer's devices are {platform}; use dot (any device) or auto"
        )
    return None if name == "dot" or platform != "tpu" else block_for(row_tokens, head_width)


def block_for(row_tokens: int, head_width: int = LANES) -> int:
    """Return the block size that pads rows least, the largest if there are several. Up to 384 tokens are one block.

    With heads of up to 128 numbers, a block of more than 1,024 tokens exceeds a chip's vector memory in the backward
    pass; with heads of 256 numbers, a block of more than 512 tokens does, and with 512 numbers, one of more than 256.
    """
    if row_tokens <= 3 * LANES:
        return whole_blocks(row_tokens, LANES)
    largest = 8 * LANES // -(-head_width // LANES)
    return min(range(largest, min(2 * LANES, largest - 1), -LANES), key=lambda block: whole_blocks(row_tokens, block))


def whole_blocks(row_tokens: int, block: int | None) -> int:
    """Round a row's tokens up to whole blocks: ``whole_blocks(1000, 512) == 1024``; ``block=None`` keeps them."""
    return row_tokens if block is None else -(-row_tokens // block) * block


# Suffixes: B rows, T tokens of a row, N query heads, K key-value heads, H head width


def flash_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    sequences_BT: Int[Array, "B T"],
    *,
    mesh: Mesh,
    axes: Sequence[str | None],
    block: int,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Let each token attend to the tokens of its own sequence up to itself.

    Args:
        q_BTNH: the queries of packed rows; T is a multiple of ``block``.
        k_BTKH: the keys; K divides N.
        v_BTKH: the values.
        sequences_BT: for each token a number that identifies its sequence in the row. It is at most the index of the
            sequence's first token; this index is best, because blocks of keys that end before it are skipped.
        mesh: the devices.
        axes: the mesh axes over which the four dimensions of queries are sharded; those of T and H must be None.
        block: the block size in tokens, from `flash_block`.
        scale: the factor of scores.
        soft_cap: the cap c of scores s, which become c * tanh(s / c); None for no cap.
        window: the number of tokens that a token attends to, including itself; None for all.
    """
    rows, heads, length = axes[0], axes[2], q_BTNH.shape[1]
    shape = (length, length)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * q_BTNH.shape[2]),
        block_sizes=_block_sizes(block, fused=fuses_backward(mesh.devices.flat[0].device_kind, q_BTNH.shape[3])),
        head_shards=1 if heads is None else mesh.shape.get(heads, 1),
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
    )
    heads_first = PartitionSpec(rows, heads, None, None)
    of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(heads, None)))

    def attend_shard(kernel: Any, *arrays: Any) -> Any:
        return jax.lax.map(lambda row: _attend_row(kernel, block, *row), arrays)

    attended = jax.shard_map(
        attend_shard,
        mesh=mesh,
        in_specs=(of_kernel, heads_first, heads_first, heads_first, PartitionSpec(rows, None)),
        out_specs=heads_first,
        check_vma=False,
    )(kernel, *(x.transpose(0, 2, 1, 3) for x in (q_BTNH * scale, k_BTKH, v_BTKH)), sequences_BT)
    return attended.transpose(0, 2, 1, 3)


def _attend_row(kernel: Any, block: int, q_NTH: Any, k_KTH: Any, v_KTH: Any, sequences_T: Any) -> Any:
    """Run the kernel on a row. Blocks of keys that end before the sequence of a query block's first query are skipped.

    The kernel's mask tables list, for each query block, the numbers of the key blocks that the mask needs, as
    ``data_next``; with ``lists_queries``, for each key block the numbers of the query blocks. Setting ``block_mask`` to
    0 skips a pair of blocks.
    """
    first_I = sequences_T[::block] // block

    def skipping(table: Any, *, lists_queries: bool = False) -> Any:
        if table is None:
            return None
        _, queries, keys = jnp.indices(table.data_next.shape)
        listed = table.data_next.astype(jnp.int32)
        queries, keys = (listed, keys) if lists_queries else (queries, listed)
        return table._replace(block_mask=jnp.where(keys >= first_I[queries], table.block_mask, 0))

    kernel = splash.SplashAttentionKernel(
        skipping(kernel.fwd_mask_info),
        skipping(kernel.dq_mask_info),
        skipping(kernel.dkv_mask_info, lists_queries=True),
        **kernel.kwargs,
    )
    return kernel(q_NTH, k_KTH, v_KTH, segment_ids=splash.SegmentIds(sequences_T, sequences_T))


def fuses_backward(device_kind: str, head_width: int) -> bool:
    """Whether one kernel computes all gradients of attention, instead of one for queries and one for keys and values.

    On v6e and rows of 17,408 tokens, one kernel takes 0.83 of the time of two, by the compiler's estimate of cycles. It
    stores the queries' gradient once for each block of keys, which needs too much memory if heads are wide.
    """
    return device_kind.startswith("TPU v6") and head_width <= LANES


def _block_sizes(block: int, *, fused: bool) -> splash.BlockSizes:
    of_query_gradients = None if fused else block
    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=of_query_gradients,
        block_kv_dq=of_query_gradients,
        use_fused_bwd_kernel=fused,
    )
