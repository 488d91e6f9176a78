"""Runs an engine's attention without the rest of the model, on the engine's devices: a prefill, then a decode step.

Suffixes: B rows, L positions (padded), T new tokens of all rows, H query heads, K key-value heads, D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

from tpu_grpo.engine.engine import Engine
from tpu_grpo.engine.launches import Runner

TOKENS_MULTIPLE = 64
"""The number of tokens of a prefill is padded to a multiple of this."""


@dataclass(frozen=True)
class Attended:
    """The outputs of attention in float64, and a decode step to time."""

    prefill_THD: Float[np.ndarray, "T H D"]
    """The outputs of the prefill: all tokens except each row's last one, concatenated row by row."""
    decode_BHD: Float[np.ndarray, "B H D"]
    """The outputs of the decode step: each row's last token."""
    decode: Callable[[], Array]
    """Runs the decode step again, to measure its time, and returns its output on the devices."""


def head_counts(engine: Engine) -> tuple[int, int, int]:
    """Return H, K and D of the attention in an engine's first layer, on all of its devices together."""
    layer = engine._runner.layers[0]
    return layer.q_head_num, layer.kv_head_num, layer.head_dim


def attend(
    engine: Engine,
    q_BLHD: Float[np.ndarray, "B L H D"],
    k_BLKD: Float[np.ndarray, "B L K D"],
    v_BLKD: Float[np.ndarray, "B L K D"],
    lengths_B: Int[np.ndarray, " B"],
) -> Attended:
    """Prefill all tokens of each row except the last, then decode the last; ``lengths_B`` must be at least 2."""
    runner, page = engine._runner, engine._runner.page_size
    rows, longest, heads, width = q_BLHD.shape
    wide = -(-longest // page) * page
    slots_BL = (page + np.arange(rows * wide, dtype=np.int32)).reshape(rows, wide)  # page 0 belongs to no row
    before_B, spec = (lengths_B - 1).astype(np.int32), engine.cache_specs[0]
    shape = (1 + rows * wide // page, *spec.shape[1:])
    row_T, place_T = np.nonzero(np.arange(longest) < before_B[:, None])
    tokens = -(-len(row_T) // TOKENS_MULTIPLE) * TOKENS_MULTIPLE

    def padded(values: np.ndarray, fill: int = 0) -> np.ndarray:
        whole = np.full((tokens, *values.shape[1:]), fill, values.dtype)
        whole[: len(values)] = values
        return whole

    new = [padded(x[row_T, place_T]) for x in (q_BLHD, k_BLKD, v_BLKD)]
    columns = {"seq_lens": before_B, "extend_lens": before_B, "input_ids": np.zeros(tokens, np.int32)}
    found = runner.attention.prefill_metadata(columns, slots_BL)
    last = [x[np.arange(rows), before_B] for x in (q_BLHD, k_BLKD, v_BLKD)]
    launch = runner.attention.launch_metadata(slots_BL, lengths_B.astype(np.int32))
    with jax.set_mesh(engine.mesh):
        cache = jax.jit(lambda: jnp.zeros(shape, spec.dtype), out_shardings=spec.sharding)()
        prefill = jax.jit(partial(_attend, runner, ForwardMode.EXTEND))
        slots_T = padded(slots_BL[row_T, place_T], fill=-1)
        prefilled, cache = prefill(*new, cache, found, np.zeros(rows, np.int32), slots_T)
        step = jax.jit(partial(_attend, runner, ForwardMode.DECODE))
        decode = partial(step, *last, cache, launch, lengths_B.astype(np.int32), slots_BL[np.arange(rows), before_B])
        decoded, _ = decode()

    def again() -> Array:
        with jax.set_mesh(engine.mesh):
            return decode()[0]

    outputs = (np.asarray(jax.device_get(x), np.float64).reshape(len(x), heads, width) for x in (prefilled, decoded))
    prefill_THD, decode_BHD = outputs
    return Attended(prefill_THD[: len(row_T)], decode_BHD, again)


def _attend(
    runner: Runner,
    mode: ForwardMode,
    q: Array,
    k: Array,
    v: Array,
    cache: Array,
    metadata: Any,
    lengths_B: Array,
    slots_T: Array,
) -> tuple[Array, Array]:
    """Write new keys and values into the cache, and attend; returns the replicated output [T, H D] and the cache."""
    decodes, dtype = mode == ForwardMode.DECODE, jnp.dtype(runner.dtype)
    found = runner.attention.at_step(metadata, lengths_B) if decodes else metadata
    batch = SimpleNamespace(forward_mode=mode, seq_lens=lengths_B, extend_prefix_lens=lengths_B, out_cache_loc=slots_T)
    layer: Any = SimpleNamespace(
        layer_id=0,
        scaling=q.shape[-1] ** -0.5,
        sliding_window_size=None,
        logit_cap=None,
        head_dim=q.shape[-1],
        kv_head_num=k.shape[1],
    )
    pool = SimpleNamespace(get_fused_kv_buffer=lambda _: cache)
    backend = runner.attention.backend(found)
    out, cache = backend(*(x.astype(dtype) for x in (q, k, v)), layer, batch, pool)
    return jax.sharding.reshard(out, P()), cache
