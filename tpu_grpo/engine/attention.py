"""The interface of attention modes, sglang-jax's reference attention, and conversion to an 8-bit KV cache.

An attention mode makes a step's attention backend, and the backend's metadata: arrays that say where each row's keys
and values are cached. ``GatherMode`` (gather_attention.py) runs on any device, ``FlashMode`` (flash_attention.py) runs
on TPUs, and ``NativeMode`` is a reference. All decode steps of one launch (a call of a compiled program) share the
result of ``launch_metadata``, built for the rows' greatest possible lengths. ``at_step`` derives each step's metadata
from this result.

``encode`` and ``decode`` convert keys and values to and from the dtype of the KV cache, ``rollout.kv_dtype``:

    auto    the model's type, so that nothing is lost
    fp8     float8_e4m3fn (Micikevicius et al. 2022, arXiv 2209.05433), without scales. The error of a number from 2^-6
            to 448 is at most 1/16 of the number, the error of a smaller number is at most 2^-10, and larger numbers
            become 448
    int8    integers from -127 to 127 times a scale. Each head of a token's key, and of its value, has its own scale, so
            the error of a number is at most 1/254 of the head's largest number. The four bytes of the scale follow the
            head's numbers

NaN and infinite values become NaN in 8 bits.

Suffixes: b rows of the batch, B rows (padded), L context, S cache slots of all rows, T new tokens of all rows, D
head width, W head width in the cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped
from sgl_jax.srt.layers.attention.native_backend import NativeAttention
from sgl_jax.srt.layers.radix_attention import RadixAttention
from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner

from tpu_grpo.engine.options import KVDtype
from tpu_grpo.records.errors import ConfigError

Columns = Mapping[str, np.ndarray]
"""The padded per-row and per-token arrays of a prefill step, by their names in StepInputs."""


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
    def cache_layer(self, pool: MHATokenToKVPool) -> jax.ShapeDtypeStruct:
        """Describe the shape, dtype and sharding of one layer of the KV cache.

        Raises:
            ConfigError: if an fp8 cache is configured that the devices cannot read, or that would save no memory.
        """

    @abstractmethod
    def prefill_metadata(self, columns: Columns, slots_bL: Int[np.ndarray, "b L"]) -> tuple[Any, Int[np.ndarray, " S"]]:
        """Return the backend's metadata for a prefill step, and the concatenated cache slots of all rows.

        The second array is empty if the backend does not read it.
        """

    @abstractmethod
    def launch_metadata(self, slots_bL: Int[np.ndarray, "b L"], ends_B: Int[np.ndarray, " B"]) -> Any:
        """Build the metadata of a launch of decode steps, after which row b has at most ``ends_B[b]`` tokens."""

    @abstractmethod
    def at_step(self, metadata: Any, seq_lens_B: Int[Array, " B"]) -> tuple[Any, Int[Array, " S"]]:
        """Compute one decode step's metadata and concatenated slots inside a jax trace; padding rows have length 0."""

    @abstractmethod
    def backend(self, metadata: Any) -> Any:
        """Make the attention backend of a step inside the step's trace.

        The runner also holds a backend, which is made with ``metadata`` None.

        Raises:
            ConfigError: for a model that this attention cannot compute.
        """


# --- sglang-jax's reference attention ---------------------------------------------------------------------------------


class NativeMode(AttentionMode):
    """The library's reference attention, which scores every query against every row's cache."""

    @override
    def cache_layer(self, pool: MHATokenToKVPool) -> jax.ShapeDtypeStruct:
        """Describe a layer as the library does.

        It pads the width of heads to a multiple of 128, and the number of heads to fill 32-bit words.
        """
        packing, tensor = 4 // np.dtype(pool.dtype).itemsize, pool.mesh.shape["tensor"]
        pages = (pool.size + pool.page_size) // pool.page_size
        words = tensor * -(-2 * pool.head_num // tensor // packing)
        shape = (pages, pool.page_size, words, packing, pool.head_dim)
        sharding = NamedSharding(pool.mesh, P("data", None, "tensor", None, None))
        return jax.ShapeDtypeStruct(shape, pool.dtype, sharding=sharding)

    def cache_loc(self, slots_bL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """Concatenate the slots of all rows. Zeros pad each row to whole pages, and the array to its fixed size."""
        real_b, page = seq_lens_B[: len(slots_bL)], self._runner.page_size
        position = np.arange(slots_bL.shape[1])
        wanted = position < (-(-real_b // page) * page)[:, None]
        values = np.where(position < real_b[:, None], slots_bL, 0)[wanted]
        return padded(values, len(seq_lens_B) * slots_bL.shape[1])

    @override
    def prefill_metadata(self, columns: Columns, slots_bL: Int[np.ndarray, "b L"]) -> tuple[Any, Int[np.ndarray, " S"]]:
        """Let the library compute its metadata from a ModelWorkerBatch with only the fields that the library reads."""
        batch = ModelWorkerBatch.__new__(ModelWorkerBatch)
        batch.forward_mode, batch.cache_loc = ForwardMode.EXTEND, self.cache_loc(slots_bL, columns["seq_lens"])
        batch.seq_lens, batch.extend_seq_lens = columns["seq_lens"], columns["extend_lens"]
        return self._runner.attn_backend.get_forward_metadata(batch), batch.cache_loc

    @override
    def launch_metadata(self, slots_bL: Int[np.ndarray, "b L"], ends_B: Int[np.ndarray, " B"]) -> Any:
        """Return the cache slots [B, L] of all rows, with zeros for padding rows."""
        return padded(slots_bL, len(ends_B))

    @override
    def at_step(self, metadata: Any, seq_lens_B: Int[Array, " B"]) -> tuple[Any, Int[Array, " S"]]:
        """Concatenate the slots as ``cache_loc`` does. The backend needs no metadata: it finds a row's slots from the
        lengths of the rows before."""
        page, position_L = self._runner.page_size, jnp.arange(metadata.shape[1])
        whole_B = -(-seq_lens_B // page) * page
        starts_B = jnp.cumsum(whole_B) - whole_B
        place_BL = jnp.where(position_L < whole_B[:, None], starts_B[:, None] + position_L, metadata.size)
        values_BL = jnp.where(position_L < seq_lens_B[:, None], metadata, 0)
        return None, jnp.zeros(metadata.size, jnp.int32).at[place_BL].set(values_BL, mode="drop")

    @override
    def backend(self, metadata: Any) -> Any:
        """Make a new backend for every trace: in a trace, flax forbids changing modules that were made outside."""
        cap = getattr(self._runner.model_config.hf_config, "attn_logit_softcapping", None)
        if cap is not None:  # the library's native attention ignores it
            raise ConfigError(
                "rollout.attention=native needs a model without attn_logit_softcapping, got "
                f"{cap:g}; use gather or auto"
            )
        return CutNativeAttention(self._runner.num_attn_heads, self._runner.num_kv_heads, self._runner.mesh)


class CutNativeAttention(NativeAttention):
    """NativeAttention that cuts its outputs, which are padded like the cache, to the width of the model's heads."""

    def __call__(
        self, q: Array, k: Array, v: Array, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> tuple[Float[Array, "T heads"], Array]:
        """Attend; returns the output and the updated cache, as the library's class does."""
        attend: Any = super().__call__  # untyped in the library
        output, cache = attend(q, k, v, layer, *args, **kwargs)
        width = cache.shape[-1]

        def cut(own_heads: Array) -> Array:  # keeps the first numbers of every head; heads stay sharded as they are
            return own_heads.reshape(len(own_heads), -1, width)[..., : layer.head_dim].reshape(len(own_heads), -1)

        by_head = P("data", "tensor")
        return jax.shard_map(cut, in_specs=by_head, out_specs=by_head)(jax.sharding.reshard(output, by_head)), cache


# --- numbers of the KV cache ------------------------------------------------------------------------------------------

FP8 = jnp.dtype(jnp.float8_e4m3fn)
FP8_LARGEST = 448.0
"""The largest float8_e4m3fn number. The type has no infinity, and ``astype`` turns larger numbers into NaN."""
INT8 = jnp.dtype(jnp.int8)
INT8_LARGEST = 127
SCALE_BYTES = 4
BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): FP8}
"""The integer type in which the cache of gather attention stores the bits of each small float type. With float arrays,
XLA on a CPU converted the whole cache at every write and every read: 0.3 s each time for a layer of 80 MB."""


def cache_dtype(name: KVDtype, model_dtype: Any) -> jnp.dtype:
    """Return the type of the cache's numbers for a value of ``rollout.kv_dtype``."""
    return {"auto": jnp.dtype(model_dtype), "fp8": FP8, "int8": INT8}[name]


def bits_of(dtype: jnp.dtype) -> jnp.dtype:
    """Return the integer type that stores a small float type (see BITS); other types are returned unchanged."""
    return next((bits for bits, small in BITS.items() if small == dtype), dtype)


def cache_width(head_dim: int, dtype: jnp.dtype) -> int:
    """Return W, the width in the cache of a head of ``head_dim`` numbers; int8 adds the four bytes of its scale."""
    return head_dim + (SCALE_BYTES if dtype == INT8 else 0)


def encode(numbers: Float[Array, "*heads D"], dtype: jnp.dtype) -> Shaped[Array, "*heads W"]:
    """Convert keys or values to the dtype of the cache."""
    if dtype in BITS:
        return jax.lax.bitcast_convert_type(encode(numbers, BITS[dtype]), dtype)
    if dtype == INT8:
        numbers = numbers.astype(jnp.float32)
        largest = jnp.max(jnp.abs(numbers), axis=-1)
        scale = jnp.where(largest == 0, 1.0, largest / INT8_LARGEST)
        whole = jnp.round(numbers / scale[..., None]).astype(INT8)
        return jnp.concatenate([whole, jax.lax.bitcast_convert_type(scale, INT8)], axis=-1)
    if dtype == FP8:
        numbers = jnp.where(jnp.isinf(numbers), jnp.nan, jnp.clip(numbers, -FP8_LARGEST, FP8_LARGEST))
    return numbers.astype(dtype)


def decode(kept: Shaped[Array, "*heads W"]) -> Float[Array, "*heads D"]:
    """Convert cached keys or values back; 8-bit ones become float32."""
    if kept.dtype in BITS:
        return decode(jax.lax.bitcast_convert_type(kept, BITS[kept.dtype]))
    if kept.dtype == INT8:
        scale = jax.lax.bitcast_convert_type(kept[..., -SCALE_BYTES:], jnp.float32)
        return kept[..., :-SCALE_BYTES].astype(jnp.float32) * scale[..., None]
    return kept.astype(jnp.float32) if kept.dtype == FP8 else kept
