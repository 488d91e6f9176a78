"""sglang-jax's flash-attention kernel on a CPU, through jax's TPU interpreter.

Two things are added for the time of the context: the interpreter (jax 0.8.1) reads and writes references that are
reshaped or bitcast, and the kernel gets its block sizes from here, because its own table wants to know which TPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.state.types import RefBitcaster, RefReshaper
from jax.experimental.pallas import tpu as pltpu
from sgl_jax.srt.layers.attention.flash_attn_kernel import flash_attention

BLOCK_TOKENS = 16
"""Keys that the kernel reads at once, and queries it works on."""


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Run Pallas TPU kernels, traced and executed inside, on the CPU."""
    with (
        mock.patch.object(interpreter, "get", _get),
        mock.patch.object(interpreter, "store", _store),
        mock.patch.object(interpreter, "swap", _swap),
        mock.patch.object(flash_attention, "get_tuned_block_sizes", _block_sizes),
        pltpu.force_tpu_interpret_mode(),
    ):
        yield


def _block_sizes(*sizes: Any) -> tuple[int, int]:
    """(pages, queries) of a block; the page size is the sixth of what the kernel asks by."""
    return max(1, BLOCK_TOKENS // sizes[5]), BLOCK_TOKENS


# --- references that are reshaped or bitcast -------------------------------------------------------------------------

_plain_get, _plain_store, _plain_swap = interpreter.get, interpreter.store, interpreter.swap


def _get(device: Any, core: Any, memory: Any, buffer: Any, transforms: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if _is_plain(transforms):
        return _plain_get(device, core, memory, buffer, transforms, *args, **kwargs)
    return _view(_plain_get(device, core, memory, buffer, ()), transforms).copy()


def _store(
    device: Any, core: Any, memory: Any, buffer: Any, transforms: Sequence[Any], value: Any, *args: Any, **kwargs: Any
) -> None:
    if _is_plain(transforms):
        return _plain_store(device, core, memory, buffer, transforms, value, *args, **kwargs)
    whole = np.array(_plain_get(device, core, memory, buffer, ()))
    _view(whole, transforms)[...] = value
    return _plain_store(device, core, memory, buffer, (), whole)


def _swap(
    device: Any, core: Any, memory: Any, buffer: Any, transforms: Sequence[Any], value: Any, mask: Any, **kwargs: Any
) -> Any:
    if _is_plain(transforms):
        return _plain_swap(device, core, memory, buffer, transforms, value, mask, **kwargs)
    whole = np.array(_plain_get(device, core, memory, buffer, ()))
    view = _view(whole, transforms)
    before = view.copy()
    np.copyto(view, value, where=True if mask is None else np.asarray(mask))
    _plain_store(device, core, memory, buffer, (), whole)
    return before


def _is_plain(transforms: Sequence[Any]) -> bool:
    return not any(isinstance(transform, RefBitcaster | RefReshaper) for transform in transforms)


def _view(whole: np.ndarray, transforms: Sequence[Any]) -> np.ndarray:
    """What a chain of transforms leaves of a buffer, as a view of it: a copy is refused."""
    view = whole
    for transform in jax.tree.map(int, transforms):
        if isinstance(transform, RefBitcaster):
            assert np.dtype(transform.dtype).itemsize == view.itemsize, "only types of one size"
            view = view.view(transform.dtype)
        elif isinstance(transform, RefReshaper):
            view = np.reshape(view, transform.shape, copy=False)
        else:
            view = view[interpreter._to_range((transform,))]
    return view
