"""sglang-jax's flash-attention kernel on a CPU, through jax's TPU interpreter.

Two things are added for the time of the context: the interpreter (jax 0.10.2) reads and writes references that are
reshaped or bitcast, and the kernel gets its block sizes from here, because our table knows TPUs only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter, utils
from jax._src.state.types import BitcastTransform, ReshapeTransform
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array
from sgl_jax.srt.kernels.ragged_paged_attention.ragged_paged_attention_v3 import RpaCase

from tpu_grpo.engine import flash_attention
from tpu_grpo.engine.flash_attention import Blocks
from tpu_grpo.engine.repairs import attention_of

BLOCK_TOKENS = 16
"""Keys and queries that the kernel computes on at once; a block of a decode step has twice as many keys."""


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Run Pallas TPU kernels, traced and executed inside, on the CPU."""
    with (
        mock.patch.object(interpreter, "get", _get),
        mock.patch.object(interpreter, "store", _store),
        mock.patch.object(interpreter, "swap", _swap),
        mock.patch.object(flash_attention, "choose_blocks", _choose_blocks),
        pltpu.force_tpu_interpret_mode(),
    ):
        yield


def _choose_blocks(_: str, *, page_size: int, **__: Any) -> Blocks:
    keys = max(BLOCK_TOKENS, page_size)
    return Blocks(decode=(1, 2 * keys, 1, keys), prefill=(BLOCK_TOKENS, keys, BLOCK_TOKENS, keys), vmem_bytes=2**25)


def attend_last(q: Array, k: Array, v: Array, cache: Array, **settings: Any) -> tuple[Array, Array]:
    """The kernel's output and cache for the last token of one row, which fills all pages of the cache but the first."""
    page, pages = cache.shape[1], np.arange(1, len(cache), dtype=np.int32)
    length = np.array([page * len(pages)], np.int32)
    blocks, starts = (1, page, 1, page), np.concatenate([np.zeros_like(length), length])
    sizes = {"d_block_sizes": blocks, "m_block_sizes": blocks, "vmem_limit_bytes": 2**25}
    with interpreted_kernels():
        attention = jax.jit(partial(attention_of(RpaCase.DECODE), **sizes, **settings))
        return attention(q, k, v, cache, length, pages, np.array([0, 1], np.int32), starts, np.ones(3, np.int32), None)


# --- references that are reshaped or bitcast -------------------------------------------------------------------------

_plain_get, _plain_store, _plain_swap = interpreter.get, interpreter.store, interpreter.swap


def _get(
    token: Any, device: Any, core: Any, memory: Any, buffer: Any, transforms: Any, *rest: Any, **named: Any
) -> Any:
    if _is_plain(transforms):
        return _plain_get(token, device, core, memory, buffer, transforms, *rest, **named)
    token, whole = _plain_get(token, device, core, memory, buffer, ())
    found = []
    _change(whole, _numbers(transforms), lambda view: found.append(view.copy()))
    return token, found[0]


def _store(
    token: Any, device: Any, core: Any, memory: Any, buffer: Any, transforms: Any, value: Any, *rest: Any, **named: Any
) -> Any:
    if _is_plain(transforms):
        return _plain_store(token, device, core, memory, buffer, transforms, value, *rest, **named)
    token, whole = _plain_get(token, device, core, memory, buffer, ())
    _change(whole, _numbers(transforms), lambda view: np.copyto(view, np.asarray(value)))
    return _plain_store(token, device, core, memory, buffer, (), whole)


def _swap(
    token: Any, device: Any, core: Any, memory: Any, buffer: Any, transforms: Any, value: Any, mask: Any, **named: Any
) -> Any:
    if _is_plain(transforms):
        return _plain_swap(token, device, core, memory, buffer, transforms, value, mask, **named)
    token, before = _get(token, device, core, memory, buffer, transforms)
    chosen = np.asarray(value) if mask is None else np.where(np.asarray(mask), value, before)
    return _store(token, device, core, memory, buffer, transforms, chosen), before


for function in (_get, _store, _swap):
    vars(function)["__wrapped__"] = function  # which the interpreter's copies of memory call


def _is_plain(transforms: Sequence[Any]) -> bool:
    return not any(isinstance(transform, BitcastTransform | ReshapeTransform) for transform in transforms)


def _numbers(transforms: Sequence[Any]) -> Sequence[Any]:
    return jax.tree.map(int, transforms)


def _change(array: np.ndarray, transforms: Sequence[Any], change: Callable[[np.ndarray], None]) -> None:
    """Call ``change`` with what a chain of transforms leaves of an array; what it changes there, changes the array."""
    if not transforms:
        change(array)
        return
    transform, rest = transforms[0], transforms[1:]
    if isinstance(transform, BitcastTransform):
        words = _bitcast(array, np.dtype(transform.dtype))
        _change(words, rest, change)
        array[...] = _bitcast(words, array.dtype)
    elif isinstance(transform, ReshapeTransform):
        _change(np.reshape(array, transform.shape, copy=False), rest, change)
    else:
        _change(array[utils.to_range((transform,))], rest, change)


def _bitcast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Copy an array as another type: a TPU packs neighbours of the last axis but one, the first into the low bits."""
    old, new = array.dtype.itemsize, dtype.itemsize
    if old == new:
        return array.copy().view(dtype)
    if old < new:  # [..., rows, lanes] of halves -> [..., rows / 2, lanes] of words
        pairs = array.reshape(*array.shape[:-2], -1, new // old, array.shape[-1])
        return np.ascontiguousarray(np.moveaxis(pairs, -2, -1)).view(dtype)[..., 0]
    halves = np.ascontiguousarray(array)[..., None].view(dtype)  # [..., rows, lanes, 2]
    return np.moveaxis(halves, -1, -2).reshape(*array.shape[:-2], -1, array.shape[-1])


assert jnp.bfloat16  # registers bfloat16 with numpy
