"""The interface of attention modes, and conversion to an 8-bit KV cache.

An attention mode makes a step's attention backend, and the backend's metadata: arrays that say where each row's keys
and values are cached. ``GatherMode`` (gather_attention.py) runs on any device, and ``FlashMode``
(flash_attention.py) runs on TPUs. All decode steps of one launch (a call of a compiled program) share the result of
``launch_metadata``, built for the rows' greatest possible lengths. ``at_step`` derives each step's metadata from this
result.

``encode`` and ``decode`` convert keys and values to and from the dtype of the KV cache, ``rollout.kv_dtype``:

    auto    the model's type, so that nothing is lost
    fp8     float8_e4m3fn (Micikevicius et al. 2022, arXiv 2209.05433), without scales. The error of a number from 2^-6
            to 448 is at most 1/16 of the number, the error of a smaller number is at most 2^-10, and larger numbers
            become 448

NaN and infinite values become NaN in 8 bits.

Suffixes: b rows of the batch, B rows (padded), L context, N pages of a row, D head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.model_runner import ModelRunner

from tpu_grpo.engine.options import KVDtype

Columns = Mapping[str, np.ndarray]
"""The padded per-row and per-token arrays of a prefill step, by their names in StepInputs."""

Windows = Int[np.ndarray, "b N"]
"""The pages of each row in layers with a window, if these have a pool of their own (window_pages.py)."""


def padded(
    values_b: Sequence[int] | Int[np.ndarray, "b *rest"],
    size: int,
    fill: int = 0,
    at: Int[np.ndarray, " b"] | None = None,
) -> Int[np.ndarray, "{size} *rest"]:
    """Copy rows to the start, or to the indices ``at``, of an int32 array of ``size`` rows filled with ``fill``."""
    values_b = np.asarray(values_b)
    whole = np.full((size, *values_b.shape[1:]), fill, np.int32)
    whole[slice(len(values_b)) if at is None else at] = values_b
    return whole


class AttentionMode(ABC):
    """Decides how the rows of a step find their cached keys and values."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner

    @abstractmethod
    def cache_layer(self, pool: MHATokenToKVPool, layer: RadixAttention, pages: int) -> jax.ShapeDtypeStruct:
        """Describe the shape, dtype and sharding of one layer of the KV cache, which has so many pages; layers may
        have different heads.

        Raises:
            ConfigError: if an fp8 cache is configured that the devices cannot read, or that would save no memory.
        """

    @abstractmethod
    def prefill_metadata(
        self, columns: Columns, slots_bL: Int[np.ndarray, "b L"], windows_bN: Windows | None = None
    ) -> Any:
        """Build the backend's metadata for a prefill step."""

    @abstractmethod
    def launch_metadata(
        self, slots_bL: Int[np.ndarray, "b L"], ends_B: Int[np.ndarray, " B"], windows_bN: Windows | None = None
    ) -> Any:
        """Build the metadata of a launch of decode steps, after which row b has at most ``ends_B[b]`` tokens."""

    @abstractmethod
    def at_step(self, metadata: Any, seq_lens_B: Int[Array, " B"]) -> Any:
        """Compute one decode step's metadata inside a jax trace; padding rows have length 0."""

    @abstractmethod
    def backend(self, metadata: Any) -> Any:
        """Make the attention backend of a step inside the step's trace.

        The runner also holds a backend, which is made with ``metadata`` None.
        """


# --- numbers of the KV cache ------------------------------------------------------------------------------------------

FP8 = jnp.dtype(jnp.float8_e4m3fn)
FP8_LARGEST = 448.0
"""The largest float8_e4m3fn number. The type has no infinity, and ``astype`` turns larger numbers into NaN."""
BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): FP8}
"""The integer type in which the cache of gather attention stores the bits of each small float type. With float arrays,
XLA on a CPU converted the whole cache at every write and every read: 0.3 s each time for a layer of 80 MB."""


def cache_dtype(name: KVDtype, model_dtype: Any) -> jnp.dtype:
    """Return the type of the cache's numbers for a value of ``rollout.kv_dtype``."""
    return FP8 if name == "fp8" else jnp.dtype(model_dtype)


def bits_of(dtype: jnp.dtype) -> jnp.dtype:
    """Return the integer type that stores a small float type (see BITS); other types are returned unchanged."""
    return next((bits for bits, small in BITS.items() if small == dtype), dtype)


def encode(numbers: Float[Array, "*heads D"], dtype: jnp.dtype) -> Shaped[Array, "*heads D"]:
    """Convert keys or values to the dtype of the cache."""
    if dtype in BITS:
        return jax.lax.bitcast_convert_type(encode(numbers, BITS[dtype]), dtype)
    if dtype == FP8:
        numbers = jnp.where(jnp.isinf(numbers), jnp.nan, jnp.clip(numbers, -FP8_LARGEST, FP8_LARGEST))
    return numbers.astype(dtype)


def decode(kept: Shaped[Array, "*heads D"]) -> Float[Array, "*heads D"]:
    """Convert cached keys or values back; 8-bit ones become float32."""
    if kept.dtype in BITS:
        return decode(jax.lax.bitcast_convert_type(kept, BITS[kept.dtype]))
    return kept.astype(jnp.float32) if kept.dtype == FP8 else kept
