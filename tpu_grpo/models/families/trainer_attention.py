"""The trainer's attention for all families: dot attention, or flash attention (splash, a Pallas kernel of jax) on TPUs.

Flash attention works on square blocks of a multiple of 128 tokens, so rows are padded to whole blocks.
For every head, dot attention stores the scores of all pairs of tokens. Flash attention stores none. For a block of
queries, it skips blocks of keys that come later, are in other sequences of the packed row, or lie before the window.

Sequences that share one copy of their prompt (tpu_grpo/learner/rows.py) attend twice: to their own tokens, and to the
prompt that is stored with another sequence. Splash returns the logsumexp of each query's scores, from which both
results are merged: with o = sum exp(s) v / l and log l for each, the whole is the sum of o exp(log l - log(l + l')). In
the backward pass, splash's kernels take the merged result and logsumexp, and so compute the gradient of the whole.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask as masks,
    splash_attention_mask_info as mask_info,
)
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


def block_of(model: Any) -> int | None:
    """Return the block size of flash attention in a model of Tunix, or in a model's config; None for dot attention."""
    config = getattr(model, "config", model)
    return config.flash_attention_block_size if getattr(config, "use_flash_attention", False) else None


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


JAX_VERSION = "0.10.2"
"""The version of jax that was reviewed for `_splash_attention_bwd`, which is private. Splash's own backward pass takes
result and logsumexp of its own call, and not those of two calls that were merged."""


def require_reviewed_jax() -> None:
    """Raise ConfigError if another version of jax is installed than the reviewed one."""
    if jax.__version__ != JAX_VERSION:
        raise ConfigError(
            f"flash attention on shared prompts needs jax {JAX_VERSION}, found {jax.__version__}; install it, or set "
            "algorithm.row_tokens to data.max_prompt_tokens + rollout.max_new_tokens, so that no prompt is shared"
        )


# Suffixes: B rows, T tokens of a row, N query heads, K key-value heads, H head width, I blocks of queries, J of keys.
# A segment is what one sequence stores in the row: its prompt and completion, or only the completion if it borrows the
# copy of the prompt that another segment, the lender, stores.


class SharedPrompts(NamedTuple):
    """How the sequences of packed rows share prompts."""

    starts_BT: Int[Array, "B T"]
    """The index of the first token of each token's segment."""
    shared_BT: Int[Array, "B T"]
    """n > 0 for the tokens of a lent prompt that begins at index n - 1, and -n for tokens of the segments that borrow
    it; 0 for all others. The lender's completion is among the others: its prompt is in its own segment."""


_shared: ContextVar[SharedPrompts | None] = ContextVar("shared", default=None)


@contextmanager
def sharing_prompts(segments_BT: Int[Array, "B T"], shared_BT: Int[Array, "B T"] | None) -> Iterator[None]:
    """Let flash attention that is traced inside share prompts; Tunix's layers have no argument for this."""
    found = None
    if shared_BT is not None:
        place_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1]), segments_BT.shape)
        begins_BT = (segments_BT == 0) | (jnp.diff(segments_BT, axis=1, prepend=-1) != 0)
        found = SharedPrompts(jax.lax.cummax(jnp.where(begins_BT, place_BT, 0), axis=1), shared_BT)
    token = _shared.set(found)
    try:
        yield
    finally:
        _shared.reset(token)


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

    shared = _shared.get()
    if shared is not None:
        require_reviewed_jax()
    given = () if shared is None else shared
    attend = _attend_row if shared is None else functools.partial(_attend_sharing_row, window=window)

    def attend_shard(kernel: Any, *arrays: Any) -> Any:
        return jax.lax.map(lambda row: attend(kernel, block, *row), arrays)

    attended = jax.shard_map(
        attend_shard,
        mesh=mesh,
        in_specs=(of_kernel, *(heads_first,) * 3, *(PartitionSpec(rows, None),) * (1 + len(given))),
        out_specs=heads_first,
        check_vma=False,
    )(kernel, *(x.transpose(0, 2, 1, 3) for x in (q_BTNH * scale, k_BTKH, v_BTKH)), sequences_BT, *given)
    return attended.transpose(0, 2, 1, 3)


def _attend_row(kernel: Any, block: int, q_NTH: Any, k_KTH: Any, v_KTH: Any, sequences_T: Any) -> Any:
    """Run the kernel on a row."""
    kernel = _of_sequences(kernel, block, sequences_T)
    return kernel(q_NTH, k_KTH, v_KTH, segment_ids=splash.SegmentIds(sequences_T, sequences_T))


def _of_sequences(kernel: Any, block: int, sequences_T: Any) -> Any:
    """Let a kernel skip blocks of keys that end before the sequence of a query block's first query.

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

    return splash.SplashAttentionKernel(
        skipping(kernel.fwd_mask_info),
        skipping(kernel.dq_mask_info),
        skipping(kernel.dkv_mask_info, lists_queries=True),
        **kernel.kwargs,
    )


def _attend_sharing_row(
    kernel: Any,
    block: int,
    q_NTH: Any,
    k_KTH: Any,
    v_KTH: Any,
    sequences_T: Any,
    starts_T: Any,
    shared_T: Any,
    *,
    window: int | None,
) -> Any:
    """Run two kernels on a row whose sequences share prompts, and merge their results.

    The index of a token in the row minus its entry in ``sequences_T`` is its position in its sequence. That of a
    borrower begins after its prompt, so there ``sequences_T`` is less than ``starts_T``.
    """
    own_kernel = _of_sequences(kernel, block, starts_T)
    own_ids = splash.SegmentIds(starts_T, starts_T)
    borrows_T, lends_T = jnp.maximum(-shared_T, 0), jnp.maximum(shared_T, 0)
    position_T = jnp.arange(len(shared_T)) - sequences_T
    # the index that a query would have if its segment followed the copy of its prompt, whose keys lie before it
    from_copy_T = jnp.where(borrows_T > 0, borrows_T - 1 + position_T, 0)
    prompt_kernel = _of_prompts(kernel, block, borrows_T, lends_T, from_copy_T, window)
    # -1 and -2 differ, so that queries that borrow nothing meet no key
    prompt_ids = splash.SegmentIds(jnp.where(borrows_T > 0, borrows_T, -1), jnp.where(lends_T > 0, lends_T, -2))
    pairs = ((own_kernel, own_ids), (prompt_kernel, prompt_ids))
    settings = tuple(tuple(sorted(each.kwargs.items())) for each, _ in pairs)  # hashable, as jax asks of constants
    parts = tuple((each.fwd_mask_info, each.dq_mask_info, each.dkv_mask_info, ids) for each, ids in pairs)
    return _attend_twice(settings, q_NTH, k_KTH, v_KTH, parts, borrows_T > 0)


def _of_prompts(kernel: Any, block: int, borrows_T: Any, lends_T: Any, from_copy_T: Any, window: int | None) -> Any:
    """Make a kernel that lets queries attend to the copies of their prompts; other pairs of blocks are skipped."""

    def lowest(values_T: Any, valid_T: Any) -> Any:
        return jnp.where(valid_T, values_T, jnp.iinfo(jnp.int32).max).reshape(-1, block).min(1)

    low_I, high_I = lowest(borrows_T, borrows_T > 0)[:, None], borrows_T.reshape(-1, block).max(1)[:, None]
    low_J, high_J = lowest(lends_T, lends_T > 0), lends_T.reshape(-1, block).max(1)
    needed_IJ = (low_I <= high_J) & (low_J <= high_I)
    if window is not None:
        last_J = jnp.arange(len(low_J)) * block + block - 1
        needed_IJ &= last_J > lowest(from_copy_T, borrows_T > 0)[:, None] - window
    queries, keys = jnp.indices(needed_IJ.shape, jnp.int32)
    sequence = None if window is None else from_copy_T.astype(jnp.int32)

    def table(listed_IJ: Any) -> Any:
        return mask_info.MaskInfo(
            data_next=listed_IJ[None],
            mask_next=None,
            block_mask=needed_IJ[None].astype(jnp.int32),
            partial_mask_blocks=None,
            q_sequence=sequence,
        )

    kwargs = kernel.kwargs | {"mask_function": None if window is None else _within(window)}
    of_query_gradients = None if kernel.dq_mask_info is None else table(keys)
    return splash.SplashAttentionKernel(table(keys), of_query_gradients, table(queries), **kwargs)


@functools.cache
def _within(window: int) -> Callable[[Any, Any], Any]:
    """Return the mask of a window; the same function for each window, because programs are kept by function."""
    return lambda query, key: query - key < window


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_twice(settings: Any, q_NTH: Any, k_KTH: Any, v_KTH: Any, parts: Any, borrows_T: Any) -> Any:
    """Attend to the own segment and, where ``borrows_T``, to a prompt in another one.

    ``settings`` and ``parts`` have one entry for each of the two kernels: its keyword arguments, as sorted pairs, and
    its mask tables (of the forward pass, of the queries' gradients, of the keys') with the ids of segments.
    """
    return _attend_forward(settings, q_NTH, k_KTH, v_KTH, parts, borrows_T)[0]


def _attend_forward(settings: Any, q_NTH: Any, k_KTH: Any, v_KTH: Any, parts: Any, borrows_T: Any) -> Any:
    found = []
    for kwargs, (forward, _, _, ids) in zip(settings, parts, strict=True):
        kernel = splash.SplashAttentionKernel(forward, None, None, **(dict(kwargs) | {"save_residuals": True}))
        out, (total,) = kernel(q_NTH, k_KTH, v_KTH, segment_ids=ids)
        found.append((out.astype(jnp.float32), total))
    (own, own_total_NT), (prompt, prompt_total_NT) = found
    # a query without keys has neither a result nor a total that may be used; in blocks of such queries they are NaN and
    # minus infinity, also where queries borrow a prompt that lies before their window
    has_keys_NT = borrows_T & jnp.isfinite(prompt_total_NT)
    prompt_total_NT = jnp.where(has_keys_NT, prompt_total_NT, -jnp.inf)
    total_NT = jnp.logaddexp(own_total_NT, prompt_total_NT)
    own_share, prompt_share = (jnp.exp(each - total_NT)[..., None] for each in (own_total_NT, prompt_total_NT))
    out = own * own_share + jnp.where(has_keys_NT[..., None], prompt, 0.0) * prompt_share
    out = out.astype(q_NTH.dtype)
    return out, (q_NTH, k_KTH, v_KTH, parts, out, total_NT)


def _attend_backward(settings: Any, saved: Any, gradient: Any) -> Any:
    q_NTH, k_KTH, v_KTH, parts, out, total_NT = saved
    sums: Any = None
    for kwargs, (_, of_queries, of_keys, ids) in zip(settings, parts, strict=True):
        residuals = (q_NTH, k_KTH, v_KTH, ids, None, out, total_NT, of_queries, of_keys)
        *_, dq, dk, dv, _, _ = splash._splash_attention_bwd(**dict(kwargs), res=residuals, do=gradient)
        each = tuple(x.astype(jnp.float32) for x in (dq, dk, dv))
        sums = each if sums is None else tuple(a + b for a, b in zip(sums, each, strict=True))
    return (*(x.astype(of.dtype) for x, of in zip(sums, (q_NTH, k_KTH, v_KTH), strict=True)), None, None)


_attend_twice.defvjp(_attend_forward, _attend_backward)


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
