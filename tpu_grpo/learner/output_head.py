"""Log-probabilities and entropies of tokens from hidden states, with the output head applied to a few at a time.

    z = logits / temperature,  logits = hidden @ head, or soft_cap * tanh(hidden @ head / soft_cap)
    log p = z - logsumexp(z)

                                          gradient with respect to z, for a gradient g of the value
    log-probability   log p[target]       g * (onehot(target) - p)
    entropy H         -sum p log p        -g * p * (log p + H)

Where tokens were drawn among the n likeliest alone, z is minus infinity for all others but the target, and they have
neither probability nor gradient. n is the engine's, for each token: the engine and the trainer, whose logits differ in
their last bits, then keep the same tokens, or two that are equally likely in each other's place. The same n tokens have
one sum of probabilities with every filter that keeps the likeliest: top-k, top-p, min-p (cf. "Keep Sampling Mask" of
DeepSeek-V3.2, arXiv 2512.02556).

The logits of all tokens would be the largest arrays of a training step. Here they exist for a chunk of tokens, and the
backward pass computes them again. Only wanted tokens are computed; head_split.py says which make a chunk, and what each
device of a mesh computes of it.

Suffixes: B rows, T tokens of a row, D width, V vocabulary. On one device: b its rows, S and R see head_split.py,
N tokens of a chunk, v the device's part of the vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int

from tpu_grpo.learner.head_split import HeadSplit, TokenQueue, chunk_tokens, chunks_needed
from tpu_grpo.models.thresholds import largest

CHUNK_BYTES = 256 * 2**20
"""Float32 logits of a chunk on a device."""


@struct.dataclass(frozen=True)
class OutputHead:
    """The matrix between hidden states and logits."""

    weight: Any
    """[V, D], as an embedding is that is tied, or [D, V]."""
    vocab_first: bool = struct.field(pytree_node=False)
    """Whether it is [V, D]."""
    soft_cap: float | None = struct.field(pytree_node=False, default=None)
    """Gemma's bound on the logits, applied before the temperature; None without one."""


def token_logprobs(
    hidden_BTD: Float[Array, "B T D"],
    head: OutputHead,
    targets_BT: Int[Array, "B T"],
    wanted_BT: Bool[Array, "B T"],
    *,
    temperature: float,
    mesh: Mesh | None,
    kept_BT: Int[Array, "B T"] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Compute the log-probability of each wanted target, and the entropy of the distribution that it is drawn from.

    Gradients flow from both to the hidden states and to the head's weight. A hidden state that is not wanted may be
    anything; its gradient is 0.

    Args:
        hidden_BTD: ``hidden_BTD[b, t]`` is the state that predicts ``targets_BT[b, t]``. Logits are float32 whatever
            the type of hidden states and head; their gradient is rounded to it before it is multiplied with them.
        head: its gradient is summed in float32, and returned in its type.
        targets_BT: ids of the vocabulary.
        wanted_BT: the positions that are computed.
        temperature: logits are divided by it.
        kept_BT: how many of the likeliest tokens each was drawn among, at least 1 where wanted; None for all.
        mesh: its axes are fsdp, whose size divides B, and tp; None stands for one device.
        chunk_bytes: the most that the float32 logits of a chunk take on a device. The backward pass also holds their
            gradient.

    Returns:
        Log-probabilities and entropies, in nats; 0 where not wanted.
    """
    split = HeadSplit.of(head.weight, 0 if head.vocab_first else 1, mesh)
    columns = head.weight.shape[split.vocab_dim] // split.parts
    chunk = chunk_tokens(wanted_BT.size // split.groups, split.seen_groups * columns, chunk_bytes)
    settings = _Settings(split, head.soft_cap, temperature, chunk)
    return _logprobs(settings, hidden_BTD, head.weight, targets_BT, wanted_BT, kept_BT)


class _Settings(NamedTuple):
    split: HeadSplit
    soft_cap: float | None
    temperature: float
    chunk: int
    """C."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    settings: _Settings, hidden_BTD: Any, weight: Any, targets_BT: Any, wanted_BT: Any, kept_BT: Any
) -> tuple[Any, Any]:
    return _forward(settings, hidden_BTD, weight, targets_BT, wanted_BT, kept_BT)[0]


def _forward(
    settings: _Settings, hidden_BTD: Any, weight: Any, targets_BT: Any, wanted_BT: Any, kept_BT: Any
) -> tuple[Any, Any]:
    counts = () if kept_BT is None else (kept_BT,)
    arguments, results = "rwrrs" + "r" * len(counts), "rrr" + "r" * len(counts)
    run = settings.split.over_devices(functools.partial(_device_forward, settings), arguments, results)
    chunks = chunks_needed(wanted_BT, settings.split.groups, settings.chunk)
    logps_BT, entropies_BT, *vectors_BT = run(hidden_BTD, weight, targets_BT, wanted_BT, chunks, *counts)
    saved = (hidden_BTD, weight, targets_BT, wanted_BT, chunks, entropies_BT, *vectors_BT)
    return (logps_BT, entropies_BT), saved


def _backward(settings: _Settings, saved: Any, gradients: Any) -> tuple[Any, ...]:
    hidden_BTD, weight, targets_BT, wanted_BT, chunks, *vectors_BT = saved
    vectors_BT = [*gradients, *vectors_BT]
    arguments = "rwrrs" + "r" * len(vectors_BT)
    run = settings.split.over_devices(functools.partial(_device_backward, settings), arguments, "rw")
    return (*run(hidden_BTD, weight, targets_BT, wanted_BT, chunks, *vectors_BT), None, None, None)


_logprobs.defvjp(_forward, _backward)


def _device_forward(
    settings: _Settings,
    hidden_bTD: Float[Array, "b T D"],
    weight: Float[Array, "_ _"],
    targets_bT: Int[Array, "b T"],
    wanted_bT: Bool[Array, "b T"],
    chunks: Int[Array, ""],
    *counts_bT: Int[Array, "b T"],
) -> tuple[Float32[Array, "b T"], ...]:
    """Return log-probabilities, entropies and logsumexp(z); and the thresholds of kept tokens, if any are left out."""
    split, queue = settings.split, TokenQueue(settings.split, settings.chunk, wanted_bT)
    targets_RS, counts_RS = queue.ordered(targets_bT), [queue.ordered(count_bT) for count_bT in counts_bT]

    def step(index: Any, found_KRS: Any) -> Any:
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
        found_KN = jnp.stack([target_N - log_N, log_N - weighted_N / sum_N, max_N + log_N, *thresholds_N])
        found_KRC = found_KN.reshape(*found_KRS.shape[:2], settings.chunk)
        return lax.dynamic_update_slice_in_dim(found_KRS, found_KRC, index * settings.chunk, axis=2)

    zeros_KRS = jnp.zeros((3 + len(counts_RS), *targets_RS.shape), jnp.float32)
    return tuple(queue.back(split.own(found_RS)) for found_RS in lax.fori_loop(0, chunks, step, zeros_KRS))


def _device_backward(
    settings: _Settings,
    hidden_bTD: Float[Array, "b T D"],
    weight: Float[Array, "_ _"],
    targets_bT: Int[Array, "b T"],
    wanted_bT: Bool[Array, "b T"],
    chunks: Int[Array, ""],
    *vectors_bT: Float32[Array, "b T"],
) -> tuple[Float[Array, "b T D"], Float[Array, "_ _"]]:
    """Return the gradients of the hidden states and of the weight.

    The vectors are the gradients of log-probabilities and of entropies, the entropies, logsumexp(z), and the thresholds
    of kept tokens, if any are left out.
    """
    split, queue = settings.split, TokenQueue(settings.split, settings.chunk, wanted_bT)
    vectors_RS = [queue.ordered(vector_bT) for vector_bT in (targets_bT, *vectors_bT)]

    def step(index: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        to_hidden_SD, to_weight = sums
        hidden_ND = queue.hidden(hidden_bTD, index)
        gradient_Nv = _logits_gradient(settings, hidden_ND, weight, *(queue.chunk(v, index) for v in vectors_RS))
        found_CD = split.sum_own(_to_hidden(settings, gradient_Nv, weight)).astype(to_hidden_SD.dtype)
        to_hidden_SD = lax.dynamic_update_slice_in_dim(to_hidden_SD, found_CD, index * settings.chunk, axis=0)
        return to_hidden_SD, to_weight + _to_weight(settings, gradient_Nv, hidden_ND)

    zeros_SD = jnp.zeros((queue.length, hidden_bTD.shape[-1]), hidden_bTD.dtype)
    to_hidden_SD, to_weight = lax.fori_loop(0, chunks, step, (zeros_SD, jnp.zeros(weight.shape, jnp.float32)))
    return queue.back(to_hidden_SD), split.sum_groups(to_weight).astype(weight.dtype)


# --- a chunk ---------------------------------------------------------------------------------------------------------


def _scaled_logits(
    settings: _Settings, hidden_ND: Float[Array, "N D"], weight: Float[Array, "_ _"]
) -> tuple[Float32[Array, "N v"], Any]:
    """Return z, and its derivative by hidden @ head."""
    logits_Nv = _product(hidden_ND, weight, 1, 1 - settings.split.vocab_dim)
    if settings.soft_cap is None:
        return logits_Nv / settings.temperature, 1.0 / settings.temperature
    bounded_Nv = jnp.tanh(logits_Nv / settings.soft_cap)
    return settings.soft_cap * bounded_Nv / settings.temperature, (1.0 - bounded_Nv**2) / settings.temperature


def _logits_gradient(
    settings: _Settings,
    hidden_ND: Float[Array, "N D"],
    weight: Float[Array, "_ _"],
    targets_N: Int[Array, " N"],
    *vectors_N: Float32[Array, " N"],
) -> Float[Array, "N v"]:
    """Compute the logits again, and return the gradient of hidden @ head; for the vectors see `_device_backward`."""
    of_logps_N1, of_entropies_N1, entropies_N1, lse_N1 = (vector_N[:, None] for vector_N in vectors_N[:4])
    z_Nv, slope_Nv = _scaled_logits(settings, hidden_ND, weight)
    logp_Nv, at_target_Nv = z_Nv - lse_N1, _is_target(settings, targets_N, z_Nv)
    spread_Nv = jnp.exp(logp_Nv) * (of_logps_N1 + of_entropies_N1 * (logp_Nv + entropies_N1))
    spread_Nv = jnp.where(_left_out(z_Nv, at_target_Nv, vectors_N[4:]), 0.0, spread_Nv)
    gradient_Nv = (jnp.where(at_target_Nv, of_logps_N1, 0.0) - spread_Nv) * slope_Nv
    return gradient_Nv.astype(jnp.promote_types(hidden_ND.dtype, weight.dtype))


def _left_out(
    z_Nv: Float[Array, "N v"], at_target_Nv: Bool[Array, "N v"], thresholds_N: Sequence[Float[Array, " N"]]
) -> Bool[Array, "N v"]:
    """Say which tokens the target was not drawn among; none without a threshold."""
    left_out_Nv = jnp.zeros_like(at_target_Nv)
    for threshold_N in thresholds_N:
        left_out_Nv |= z_Nv <= threshold_N[:, None]
    return left_out_Nv & ~at_target_Nv


def _to_hidden(settings: _Settings, gradient_Nv: Array, weight: Array) -> Float32[Array, "N D"]:
    return _product(gradient_Nv, weight, 1, settings.split.vocab_dim)


def _to_weight(settings: _Settings, gradient_Nv: Array, hidden_ND: Array) -> Float32[Array, "_ _"]:
    factors = (gradient_Nv, hidden_ND) if settings.split.vocab_dim == 0 else (hidden_ND, gradient_Nv)
    return _product(*factors, 0, 0)


def _product(left: Array, right: Array, left_dim: int, right_dim: int) -> Float32[Array, "_ _"]:
    """Sum over a dimension of two matrices, in float32; only matrices of different types are converted."""
    common = jnp.promote_types(left.dtype, right.dtype)
    dims = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left.astype(common), right.astype(common), dims, preferred_element_type=jnp.float32)


def _is_target(settings: _Settings, targets_N: Int[Array, " N"], z_Nv: Float[Array, "N v"]) -> Bool[Array, "N v"]:
    columns = z_Nv.shape[1]
    return settings.split.first_column(columns) + jnp.arange(columns) == targets_N[:, None]
