"""Log-probabilities and entropies of tokens from hidden states, with the output head applied to a few tokens at a time.

    z = logits / temperature,  logits = hidden @ head, or soft_cap * tanh(hidden @ head / soft_cap)
    log p = z - logsumexp(z)

                                          gradient with respect to z, for a gradient g of the value
    log-probability   log p[target]       g * (onehot(target) - p)
    entropy H         -sum p log p        -g * p * (log p + H)

If a token was drawn from only the n likeliest tokens, z is minus infinity for all other tokens except the target, so
that these tokens have neither probability nor gradient. The engine reports n for each token, whichever filter (top-k,
top-p or min-p) made the choice. The trainer's logits differ from the engine's in the last bits, but the n likeliest
tokens are the same, except that two equally likely tokens may swap (cf. "Keep Sampling Mask" of DeepSeek-V3.2, arXiv
2512.02556).

Besides the target, log-probabilities of M more tokens can be had for each place (`token_logprobs`), with gradients like
the target's, and the K likeliest tokens (`likeliest_tokens`), without gradients.

The logits of all tokens would be the largest arrays of a training step. Here they exist for one chunk of wanted tokens
at a time, and the backward pass computes them again. Rows are split over fsdp; the rows of a shard form a group. In
each group the wanted tokens are moved to the front, and all groups go through their tokens chunk by chunk, until the
group with the most wanted tokens is done. For example, with 2 groups of one row and chunks of 2 tokens:

    wanted  [1 0 1 0 1]   indices in this order   [0 2][4 1][3  ]   the first group's 3 wanted tokens
            [0 0 0 1 0]                           [3 0][1 2][4  ]   need two chunks

The vocabulary is split over as many devices as divide its size, see `vocab_axes`. Devices then exchange the hidden
states of a chunk, a few numbers per token, and sums over each device's part of the vocabulary.

Suffixes: B rows, T tokens of a row, D width, V vocabulary. On one device: b its rows, S the tokens of its group padded
to whole chunks, R groups whose tokens it sees, C tokens of a group in a chunk, N = R*C, v its part of the vocabulary,
M tokens whose log-probabilities are wanted besides the target's, K likeliest tokens, L results for each token.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from tpu_grpo.models.thresholds import largest

CHUNK_BYTES, LARGEST_CHUNK_BYTES = 256 * 2**20, 640 * 2**20
"""The most bytes that the float32 logits of a chunk take on a device: as many as the float32 gradient of the device's
part of the head, but at least the first and at most the second number."""
BLOCK_BYTES = 40 * 2**20
"""The most bytes of the float32 gradient to which the chunks of a backward pass add, where a device has the whole
vocabulary: as many as a chip's vector memory has room for. The vocabulary is then gone through in blocks. As one block,
as on several devices, each chunk would read and write the gradient in the chip's main memory. Of small models, whose
vocabulary is large for their layers, this takes almost as long as a chunk's products."""
_LEAST = 1e-37
"""The least sum of probabilities that has a logarithm."""
_TILE = 16
"""The rows in a tile of a bfloat16 matrix on a TPU. If a group needs several chunks and this many tokens fit into a
chunk, C is a multiple of it."""


@struct.dataclass(frozen=True)
class OutputHead:
    """The matrix between hidden states and logits."""

    weight: Any
    """[V, D] for a tied embedding, else [D, V]."""
    vocab_first: bool = struct.field(pytree_node=False)
    """Whether ``weight`` is [V, D]."""
    soft_cap: float | None = struct.field(pytree_node=False, default=None)
    """Gemma's bound on the logits, applied before the temperature; None for no bound."""


def token_logprobs(
    hidden_BTD: Float[Array, "B T D"],
    head: OutputHead,
    targets_BT: Int[Array, "B T"],
    wanted_BT: Bool[Array, "B T"],
    *,
    temperature: float,
    mesh: Mesh | None,
    kept_BT: Int[Array, "B T"] | None = None,
    also_BTM: Int[Array, "B T M"] | None = None,
    chunk_bytes: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"], Float32[Array, "B T M"] | None]:
    """Compute the log-probability of each wanted target, and the entropy of the distribution from which it is drawn.

    Gradients flow from both to the hidden states and to the head's weight. Hidden states at positions that are not
    wanted may have any value; their gradient is 0.

    Args:
        hidden_BTD: ``hidden_BTD[b, t]`` is the state that predicts ``targets_BT[b, t]``. Logits are always float32; in
            the backward pass their gradient is rounded to the common type of hidden states and head.
        head: the gradient of its weight is summed in float32, and returned in the weight's type.
        targets_BT: ids of the vocabulary.
        wanted_BT: the positions that are computed.
        temperature: logits are divided by it.
        kept_BT: how many of the likeliest tokens each token was drawn from, at least 1 where wanted; None for all V.
        also_BTM: further tokens whose log-probabilities are wanted, not together with ``kept_BT``; None for none.
        mesh: its axes are fsdp, whose size divides B, and tp; None stands for one device.
        chunk_bytes: the most bytes that the float32 logits of a chunk take on a device; None chooses, see CHUNK_BYTES.
            The backward pass also holds their gradient.
        block_bytes: the most bytes of the gradient of a block of the head, see BLOCK_BYTES.

    Returns:
        Log-probabilities and entropies, in nats; 0 where not wanted. The log-probabilities of ``also_BTM``, or None.
    """
    settings = _settings(head, wanted_BT, temperature, mesh, chunk_bytes, block_bytes)
    found: Any = _logprobs(settings, hidden_BTD, head.weight, targets_BT, wanted_BT, kept_BT, also_BTM)
    logps_BT, entropies_BT, *of_also = found
    return logps_BT, entropies_BT, of_also[0] if of_also else None


def likeliest_tokens(
    hidden_BTD: Float[Array, "B T D"],
    head: OutputHead,
    targets_BT: Int[Array, "B T"],
    wanted_BT: Bool[Array, "B T"],
    *,
    count: int,
    below: int,
    temperature: float,
    mesh: Mesh | None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Float32[Array, "B T"], Int[Array, "B T K"], Float32[Array, "B T bins"]]:
    """Compute the log-probability of each wanted target, the ids of the likeliest tokens, and the log-probabilities of
    these K tokens and, last, of all others together (not from a difference to 1, which would be inexact).

    The arguments are those of `token_logprobs`. ``count`` is K, at most ``below``; ids of ``below`` and more are left
    out. The ids are in descending order of probability, and equally likely ones in ascending order. 0 where not wanted.
    """
    settings = _settings(head, wanted_BT, temperature, mesh, chunk_bytes)._replace(top=(count, below))
    run = settings.split.over_devices(functools.partial(_device_forward, settings), "rwrrs", "rrrr")
    chunks = chunks_needed(wanted_BT, settings.split.groups, settings.chunk)
    logps_BT, _, _, found = run(hidden_BTD, head.weight, targets_BT, wanted_BT, chunks)
    return logps_BT, found[..., count + 1 :].astype(jnp.int32), found[..., : count + 1]


def _settings(
    head: OutputHead,
    wanted_BT: Bool[Array, "B T"],
    temperature: float,
    mesh: Mesh | None,
    chunk_bytes: int | None,
    block_bytes: int = BLOCK_BYTES,
) -> "_Settings":
    split = HeadSplit.of(head.weight, 0 if head.vocab_first else 1, mesh)
    columns, width = head.weight.shape[split.vocab_dim] // split.parts, head.weight.shape[1 - split.vocab_dim]
    most = most_chunk_bytes(columns, width) if chunk_bytes is None else chunk_bytes
    chunk = chunk_tokens(wanted_BT.size // split.groups, split.seen_groups * columns, most)
    block = columns if split.axes else block_columns(columns, width, block_bytes)
    return _Settings(split, head.soft_cap, temperature, chunk, block)


class _Settings(NamedTuple):
    split: "HeadSplit"
    soft_cap: float | None
    temperature: float
    chunk: int
    """C, the tokens of a group in a chunk."""
    block: int
    """The part of the vocabulary that the backward pass goes through at a time."""
    top: tuple[int, int] | None = None
    """K and the bound of the ids of the likeliest tokens; None for none."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    settings: _Settings, hidden_BTD: Any, weight: Any, targets_BT: Any, wanted_BT: Any, kept_BT: Any, also_BTM: Any
) -> tuple[Any, ...]:
    return _forward(settings, hidden_BTD, weight, targets_BT, wanted_BT, kept_BT, also_BTM)[0]


def _forward(
    settings: _Settings, hidden_BTD: Any, weight: Any, targets_BT: Any, wanted_BT: Any, kept_BT: Any, also_BTM: Any
) -> tuple[Any, Any]:
    assert kept_BT is None or also_BTM is None, "further tokens have probabilities among all tokens only"
    counts = () if kept_BT is None else (kept_BT,)
    also = () if also_BTM is None else (also_BTM,)
    arguments, results = "rwrrs" + "r" * len(counts + also), "rrr" + "r" * len(counts + also)
    device = functools.partial(_device_forward if also_BTM is None else _device_forward_also, settings)
    run = settings.split.over_devices(device, arguments, results)
    chunks = chunks_needed(wanted_BT, settings.split.groups, settings.chunk)
    logps_BT, entropies_BT, *vectors_BT = run(hidden_BTD, weight, targets_BT, wanted_BT, chunks, *counts, *also)
    found = logps_BT, entropies_BT
    if also_BTM is not None:
        lse_BT, *of_also = vectors_BT
        vectors_BT, found = [lse_BT], (*found, *of_also)
    return found, (hidden_BTD, weight, targets_BT, wanted_BT, chunks, also_BTM, entropies_BT, *vectors_BT)


def _backward(settings: _Settings, saved: Any, gradients: Any) -> tuple[Any, ...]:
    hidden_BTD, weight, targets_BT, wanted_BT, chunks, also_BTM, *vectors_BT = saved
    of_logps_BT, of_entropies_BT, *of_also = gradients
    vectors_BT = [of_logps_BT, of_entropies_BT, *vectors_BT]
    also = () if also_BTM is None else (also_BTM, *of_also)
    device = functools.partial(_device_backward, settings, len(vectors_BT))
    run = settings.split.over_devices(device, "rwrrs" + "r" * len([*vectors_BT, *also]), "rw")
    return (*run(hidden_BTD, weight, targets_BT, wanted_BT, chunks, *vectors_BT, *also), None, None, None, None)


_logprobs.defvjp(_forward, _backward)


def _device_forward_also(settings: _Settings, *arguments: Any) -> tuple[Float32[Array, "b T ..."], ...]:
    """Call `_device_forward` with further tokens as the last argument."""
    *others, also_bTM = arguments
    return _device_forward(settings, *others, also_bTM=also_bTM)


def _device_forward(
    settings: _Settings,
    hidden_bTD: Float[Array, "b T D"],
    weight: Float[Array, "_ _"],
    targets_bT: Int[Array, "b T"],
    wanted_bT: Bool[Array, "b T"],
    chunks: Int[Array, ""],
    *counts_bT: Int[Array, "b T"],
    also_bTM: Int[Array, "b T M"] | None = None,
) -> tuple[Float32[Array, "b T ..."], ...]:
    """Return log-probabilities, entropies, logsumexp(z) and, with counts n, the bound on z that n tokens exceed; or
    with further tokens, their log-probabilities [b, T, M]; or those of the likeliest ones and of the rest, and their
    ids, [b, T, 2K+1]."""
    split, queue = settings.split, TokenQueue(settings.split, settings.chunk, wanted_bT)
    targets_RS, counts_RS = queue.ordered(targets_bT), [queue.ordered(count_bT) for count_bT in counts_bT]
    also_RSM = None if also_bTM is None else queue.ordered(also_bTM)

    def step(index: Any, found_LRS: Any) -> Any:
        z_Nv, _ = _scaled_logits(settings, queue.hidden(hidden_bTD, index), weight)
        at_target_Nv = _is_target(settings, queue.chunk(targets_RS, index), z_Nv)
        thresholds_N = [largest(z_Nv, queue.chunk(each, index), split.sum, split.max) for each in counts_RS]
        left_out_Nv = _left_out(z_Nv, at_target_Nv, thresholds_N)
        max_N = split.max(z_Nv.max(axis=1))
        z_Nv = z_Nv - max_N[:, None]
        exp_Nv = jnp.where(left_out_Nv, 0.0, jnp.exp(z_Nv))
        target_Nv = jnp.where(at_target_Nv, z_Nv, 0.0)
        sums = (exp_Nv.sum(axis=1), (exp_Nv * z_Nv).sum(axis=1), target_Nv.sum(axis=1))
        sum_N, weighted_N, target_N = split.sum(sums)
        log_N = jnp.log(sum_N)
        more = list(thresholds_N)
        if also_RSM is not None:
            inside_NM, at_NM = _places(settings, queue.chunk(also_RSM, index), z_Nv)
            own_NM = jnp.where(inside_NM, jnp.take_along_axis(z_Nv, at_NM, axis=1), 0.0)
            more += list((split.sum(own_NM) - log_N[:, None]).T)
        if settings.top is not None:
            top_NK, ids_NK = _top(settings, z_Nv)
            inside_NK, at_NK = _places(settings, ids_NK, z_Nv)
            others_Nv = exp_Nv.at[jnp.arange(len(z_Nv))[:, None], at_NK].multiply(jnp.where(inside_NK, 0.0, 1.0))
            rest_N = jnp.log(jnp.maximum(split.sum(others_Nv.sum(axis=1)), _LEAST))
            top_NK = jnp.concatenate([top_NK, rest_N[:, None]], axis=1) - log_N[:, None]
            more += [*top_NK.T, *ids_NK.T.astype(jnp.float32)]  # exact, as ids are below 2^24
        found_LN = jnp.stack([target_N - log_N, log_N - weighted_N / sum_N, max_N + log_N, *more])
        found_LRC = found_LN.reshape(*found_LRS.shape[:2], settings.chunk)
        return lax.dynamic_update_slice_in_dim(found_LRS, found_LRC, index * settings.chunk, axis=2)

    count = (
        len(counts_RS)
        + (0 if also_RSM is None else also_RSM.shape[-1])
        + (2 * settings.top[0] + 1 if settings.top else 0)
    )
    zeros_LRS = jnp.zeros((3 + count, *targets_RS.shape), jnp.float32)
    found_LRS = lax.fori_loop(0, chunks, step, zeros_LRS)
    alone = 3 + len(counts_RS)
    found = [queue.back(split.own(found_RS)) for found_RS in found_LRS[:alone]]
    if count > len(counts_RS):
        found.append(queue.back(split.own(jnp.moveaxis(found_LRS[alone:], 0, -1))))
    return tuple(found)


def _device_backward(
    settings: _Settings,
    count: int,
    hidden_bTD: Float[Array, "b T D"],
    weight: Float[Array, "_ _"],
    targets_bT: Int[Array, "b T"],
    wanted_bT: Bool[Array, "b T"],
    chunks: Int[Array, ""],
    *vectors_bT: Shaped[Array, "b T ..."],
) -> tuple[Float[Array, "b T D"], Float[Array, "_ _"]]:
    """Return the gradients of the hidden states and of the weight. The ``count`` vectors are the gradients of
    log-probabilities and of entropies, the entropies, logsumexp(z), and the thresholds from `_device_forward`, if any;
    then come further tokens and the gradients of their log-probabilities, if any, [b, T, M]."""
    split, queue = settings.split, TokenQueue(settings.split, settings.chunk, wanted_bT)
    vectors_RS = [queue.ordered(vector_bT) for vector_bT in (targets_bT, *vectors_bT[:count])]
    also_RSM = [queue.ordered(each_bTM) for each_bTM in vectors_bT[count:]]

    columns, chunk = weight.shape[split.vocab_dim], settings.chunk
    blocks, rest = divmod(columns, settings.block)

    def of_block(width: int, first: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        """Add a block's gradient of the hidden states, and write its gradient of the weight."""
        part = lax.dynamic_slice_in_dim(weight, first, width, split.vocab_dim)

        def step(index: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
            to_hidden_SD, to_part = sums
            hidden_ND, also = queue.hidden(hidden_bTD, index), [queue.chunk(each, index) for each in also_RSM]
            vectors_N = [queue.chunk(vector_RS, index) for vector_RS in vectors_RS]
            gradient_Nv = _logits_gradient(settings, hidden_ND, part, first, also, *vectors_N)
            own_CD, at = split.sum_own(_product(gradient_Nv, part, 1, split.vocab_dim)), index * chunk
            if width < columns:
                own_CD += lax.dynamic_slice_in_dim(to_hidden_SD, at, chunk)
            to_hidden_SD = lax.dynamic_update_slice_in_dim(to_hidden_SD, own_CD.astype(to_hidden_SD.dtype), at, axis=0)
            factors = (gradient_Nv, hidden_ND) if split.vocab_dim == 0 else (hidden_ND, gradient_Nv)
            return to_hidden_SD, to_part + _product(*factors, 0, 0)

        to_hidden_SD, to_weight = found
        to_hidden_SD, to_part = lax.fori_loop(0, chunks, step, (to_hidden_SD, jnp.zeros(part.shape, jnp.float32)))
        to_part = split.sum_groups(to_part).astype(weight.dtype)
        return to_hidden_SD, lax.dynamic_update_slice_in_dim(to_weight, to_part, first, split.vocab_dim)

    summed = hidden_bTD.dtype if settings.block == columns else jnp.float32
    found = jnp.zeros((queue.length, hidden_bTD.shape[-1]), summed), lax.empty(weight.shape, weight.dtype)
    found = lax.fori_loop(0, blocks, lambda n, found: of_block(settings.block, n * settings.block, found), found)
    to_hidden_SD, to_weight = of_block(rest, blocks * settings.block, found) if rest else found
    return queue.back(to_hidden_SD.astype(hidden_bTD.dtype)), to_weight


# --- a chunk ----------------------------------------------------------------------------------------------------------


def _scaled_logits(
    settings: _Settings, hidden_ND: Float[Array, "N D"], weight: Float[Array, "_ _"]
) -> tuple[Float32[Array, "N v"], Any]:
    """Return z, and its derivative with respect to hidden @ head."""
    logits_Nv = _product(hidden_ND, weight, 1, 1 - settings.split.vocab_dim)
    if settings.soft_cap is None:
        return logits_Nv / settings.temperature, 1.0 / settings.temperature
    bounded_Nv = jnp.tanh(logits_Nv / settings.soft_cap)
    return settings.soft_cap * bounded_Nv / settings.temperature, (1.0 - bounded_Nv**2) / settings.temperature


def _logits_gradient(
    settings: _Settings,
    hidden_ND: Float[Array, "N D"],
    weight: Float[Array, "_ _"],
    first: Any,
    also: Sequence[Shaped[Array, "N M"]],
    targets_N: Int[Array, " N"],
    *vectors_N: Float32[Array, " N"],
) -> Float[Array, "N v"]:
    """Recompute the logits, and return the gradient for hidden @ head. ``weight`` is the block of the device's part
    that begins at ``first``. ``also`` has further tokens and the gradients of their log-probabilities; for the vectors
    see `_device_backward`."""
    of_logps_N1, of_entropies_N1, entropies_N1, lse_N1 = (vector_N[:, None] for vector_N in vectors_N[:4])
    z_Nv, slope_Nv = _scaled_logits(settings, hidden_ND, weight)
    logp_Nv, at_target_Nv = z_Nv - lse_N1, _is_target(settings, targets_N, z_Nv, first)
    of_tokens_Nv, of_all_N1 = jnp.where(at_target_Nv, of_logps_N1, 0.0), of_logps_N1
    if also:
        also_NM, of_also_NM = also
        inside_NM, at_NM = _places(settings, also_NM, z_Nv, first)
        row_N1 = jnp.arange(len(z_Nv))[:, None]
        of_tokens_Nv = of_tokens_Nv.at[row_N1, at_NM].add(jnp.where(inside_NM, of_also_NM, 0.0))
        of_all_N1 = of_all_N1 + of_also_NM.sum(axis=1, keepdims=True)
    spread_Nv = jnp.exp(logp_Nv) * (of_all_N1 + of_entropies_N1 * (logp_Nv + entropies_N1))
    spread_Nv = jnp.where(_left_out(z_Nv, at_target_Nv, vectors_N[4:]), 0.0, spread_Nv)
    gradient_Nv = (of_tokens_Nv - spread_Nv) * slope_Nv
    return gradient_Nv.astype(jnp.promote_types(hidden_ND.dtype, weight.dtype))


def _left_out(
    z_Nv: Float[Array, "N v"], at_target_Nv: Bool[Array, "N v"], thresholds_N: Sequence[Float[Array, " N"]]
) -> Bool[Array, "N v"]:
    """Mark the tokens that the target was not drawn from: all but the target whose z is at or below a threshold."""
    left_out_Nv = jnp.zeros_like(at_target_Nv)
    for threshold_N in thresholds_N:
        left_out_Nv |= z_Nv <= threshold_N[:, None]
    return left_out_Nv & ~at_target_Nv


def _product(left: Array, right: Array, left_dim: int, right_dim: int) -> Float32[Array, "_ _"]:
    """Contract a dimension of two matrices, accumulating in float32; they are converted only if their types differ."""
    common = jnp.promote_types(left.dtype, right.dtype)
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left.astype(common), right.astype(common), dims, preferred_element_type=jnp.float32)


def _is_target(
    settings: _Settings, targets_N: Int[Array, " N"], z_Nv: Float[Array, "N v"], first: Any = 0
) -> Bool[Array, "N v"]:
    return _ids(settings, z_Nv, first) == targets_N[:, None]


def _ids(settings: _Settings, z_Nv: Float[Array, "N v"], first: Any = 0) -> Int[Array, " v"]:
    """Return the ids of the tokens in the device's part of the vocabulary, or in the block of it at ``first``."""
    columns, axes = z_Nv.shape[1], settings.split.axes
    return (lax.axis_index(axes) * columns if axes else first) + jnp.arange(columns)


def _places(
    settings: _Settings, tokens_NM: Int[Array, "N M"], z_Nv: Float[Array, "N v"], first: Any = 0
) -> tuple[Bool[Array, "N M"], Int[Array, "N M"]]:
    """Return which tokens `_ids` has, and their places there (any place for others)."""
    at_NM = tokens_NM - _ids(settings, z_Nv, first)[0]
    inside_NM = (at_NM >= 0) & (at_NM < z_Nv.shape[1])
    return inside_NM, jnp.where(inside_NM, at_NM, 0)


def _top(settings: _Settings, z_Nv: Float[Array, "N v"]) -> tuple[Float[Array, "N K"], Int[Array, "N K"]]:
    """Return z and the ids of the K likeliest tokens of the whole vocabulary, equally likely ones by ascending id."""
    assert settings.top is not None
    (count, below), ids_v = settings.top, _ids(settings, z_Nv)
    best, at = lax.top_k(jnp.where(ids_v < below, z_Nv, -jnp.inf), min(count, z_Nv.shape[1]))
    ids = ids_v[at]
    if axes := settings.split.axes:  # the parts are in the order of their ids
        best, ids = (lax.all_gather(each, axes, axis=1, tiled=True) for each in (best, ids))
        best, at = lax.top_k(best, count)
        ids = jnp.take_along_axis(ids, at, axis=1)
    return best, ids


# --- how the work is divided, over devices and in chunks --------------------------------------------------------------


def vocab_axes(vocabulary: int, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes over which the vocabulary is split: the most devices that divide it, on the fewest axes.

    tp comes first: Tunix splits the vocabulary over tp and the width over fsdp, so that an all-to-all within fsdp is
    enough to reshard the head. Where fsdp x tp does not divide the vocabulary, one axis is left out. If that is fsdp,
    the devices along it use the same part of the head for different rows; if it is tp, the devices along it compute the
    same values. Where neither axis divides the vocabulary, every device gathers the whole head.
    """
    choices = [axes for axes in ((), ("tp",), ("fsdp",), ("tp", "fsdp")) if vocabulary % _size(mesh, axes) == 0]
    return max(choices, key=lambda axes: _size(mesh, axes))


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def most_chunk_bytes(columns: int, width: int) -> int:
    """Return the most bytes of a chunk's logits, for a device with ``columns`` tokens of the vocabulary; see
    CHUNK_BYTES."""
    return min(max(CHUNK_BYTES, 4 * columns * width), LARGEST_CHUNK_BYTES)


def block_columns(columns: int, width: int, block_bytes: int) -> int:
    """Return how much of the vocabulary a block has: all, or the largest power of 2 whose gradient fits. A power of 2,
    because a block can be written quickly only where its rows are divided evenly: Qwen's vocabulary is 128 x 1187."""
    most = max(1, block_bytes // (4 * width))
    return columns if columns <= most else 1 << (most.bit_length() - 1)


def chunk_tokens(tokens: int, logits_per_token: int, chunk_bytes: int) -> int:
    """Return the chunk size C for groups of ``tokens`` tokens; a token has ``logits_per_token`` logits on a device.

    Chunks are as equal as possible: 1000 tokens become two chunks of 512 where 900 would fit into one.
    """
    most = max(1, chunk_bytes // (4 * logits_per_token))
    if tokens <= most:
        return tokens
    tile = _TILE if most >= _TILE else 1
    most -= most % tile
    even = -(-tokens // -(-tokens // most))
    return -(-even // tile) * tile


def chunks_needed(wanted_BT: Bool[Array, "B T"], groups: int, chunk: int) -> Int[Array, ""]:
    """Return the number of chunks in the group with the most wanted tokens."""
    return -(-wanted_BT.reshape(groups, -1).sum(axis=1, dtype=jnp.int32).max() // chunk)


@dataclass(frozen=True)
class HeadSplit:
    """The sharding of the output head's work. On one device there are no axes and no communication.

    The methods after `over_devices` are for the functions that it wraps.
    """

    mesh: Mesh | None
    axes: tuple[str, ...]
    """See `vocab_axes`."""
    vocab_dim: int
    """The dimension of the head's weight that is the vocabulary."""

    @classmethod
    def of(cls, weight: Any, vocab_dim: int, mesh: Mesh | None) -> "HeadSplit":
        """Choose the sharding for a head with this weight."""
        if mesh is None or mesh.size == 1:
            return cls(None, (), vocab_dim)
        return cls(mesh, vocab_axes(weight.shape[vocab_dim], mesh), vocab_dim)

    @property
    def groups(self) -> int:
        """The number of groups of rows."""
        return 1 if self.mesh is None else self.mesh.shape["fsdp"]

    @property
    def parts(self) -> int:
        """The number of parts of the vocabulary."""
        return 1 if self.mesh is None else _size(self.mesh, self.axes)

    @property
    def seen_groups(self) -> int:
        """R, the number of groups that a device sees: all if the vocabulary is split over fsdp, else its own."""
        return self.groups if "fsdp" in self.axes else 1

    def over_devices(self, function: Callable[..., Any], arguments: str, results: str) -> Callable[..., Any]:
        """Wrap a function to run on each device's shards. A letter for each argument and result says what it is: r rows
        [B, ...], w the weight, s a scalar."""
        if self.mesh is None:
            return function
        specs = {"r": P("fsdp"), "w": P(*[None] * self.vocab_dim, self.axes or None), "s": P()}
        in_specs, out_specs = (tuple(specs[kind] for kind in kinds) for kinds in (arguments, results))
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def gather(self, values: Array) -> Array:
        """Gather the values of all groups that the device sees, [R, ...], from each group's own, [...]."""
        return lax.all_gather(values, "fsdp") if "fsdp" in self.axes else values[None]

    def own(self, values_R: Array) -> Array:
        """Return the values of the device's own group, [...]."""
        return values_R[lax.axis_index("fsdp") if "fsdp" in self.axes else 0]

    def max(self, values: Array) -> Array:
        """Return the maximum over the parts of the vocabulary."""
        return lax.pmax(values, self.axes) if self.axes else values

    def sum(self, values: Any) -> Any:
        """Sum over the parts of the vocabulary."""
        return lax.psum(values, self.axes) if self.axes else values

    def sum_own(self, values_N: Array) -> Array:
        """Sum [N, ...] over the parts of the vocabulary, and return the part of the device's own group, [C, ...]."""
        values = lax.psum_scatter(values_N, "fsdp", tiled=True) if "fsdp" in self.axes else values_N
        return lax.psum(values, "tp") if "tp" in self.axes else values

    def sum_groups(self, values: Array) -> Array:
        """Add up what each device summed over the groups that it sees, into the sum over all groups."""
        return values if self.seen_groups == self.groups else lax.psum(values, "fsdp")


class TokenQueue:
    """The tokens of a device's group, the wanted ones first, padded to whole chunks."""

    def __init__(self, split: HeadSplit, chunk: int, wanted_bT: Bool[Array, "b T"]):
        self._gather, self._chunk, self._wanted_bT = split.gather, chunk, wanted_bT
        wanted = wanted_bT.reshape(-1)
        self.length = -(-wanted.size // chunk) * chunk
        """S, the number of places in the queue."""
        self._order_S = jnp.pad(jnp.argsort(~wanted, stable=True), (0, self.length - wanted.size))
        self._valid_S = jnp.arange(self.length) < wanted.sum()
        self._place_bT = (jnp.cumsum(wanted) - 1).reshape(wanted_bT.shape)

    def ordered(self, values_bT: Array) -> Array:
        """Put values in queue order, for all groups that the device sees, [R, S, ...]; 0 after the wanted tokens."""
        of_token = values_bT.shape[2:]
        values_S = _taken(values_bT.reshape(-1, *of_token), self._order_S)
        return self._gather(jnp.where(self._valid_S.reshape(-1, *(1 for _ in of_token)), values_S, 0))

    def chunk(self, values_RS: Array, index: Any) -> Array:
        """Return the values of a chunk, [N, ...]."""
        return self._cut(values_RS, index, axis=1).reshape(-1, *values_RS.shape[2:])

    def hidden(self, hidden_bTD: Float[Array, "b T D"], index: Any) -> Float[Array, "N D"]:
        """Return the hidden states of a chunk; 0 after the wanted tokens."""
        width = hidden_bTD.shape[-1]
        hidden_CD = _taken(hidden_bTD.reshape(-1, width), self._cut(self._order_S, index))
        hidden_CD = jnp.where(self._cut(self._valid_S, index)[:, None], hidden_CD, 0)
        return self._gather(hidden_CD).reshape(-1, width)

    def back(self, values_S: Array) -> Array:
        """Scatter values in queue order, [S, ...], to their positions, [b, T, ...]; 0 where no token is wanted."""
        wanted = self._wanted_bT.reshape(self._wanted_bT.shape + (1,) * (values_S.ndim - 1))
        return jnp.where(wanted, _taken(values_S, self._place_bT), 0)

    def _cut(self, values: Array, index: Any, axis: int = 0) -> Array:
        return lax.dynamic_slice_in_dim(values, index * self._chunk, self._chunk, axis=axis)


def _taken(values: Array, at: Int[Array, "..."]) -> Array:
    return values.at[at].get(mode="clip")  # a token that is not wanted may have the place -1
