"""The attention modes of an engine: what each takes from a scheduled batch, and the backend it runs in the step.

A prefill step has metadata of its own. The decode steps of a launch share what ``launch_metadata`` builds for rows as
long as they may get, and ``at_step`` makes of it what one step needs.

Suffixes: b rows of the batch, B rows (padded), L context, S cache slots of all rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttentionMetadata
from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner

from tpu_grpo.engine import gather_attention
from tpu_grpo.engine.flash_attention import BlockedFlashAttention, check_fp8
from tpu_grpo.engine.gather_attention import GatherAttention, block_metadata, decode_metadata
from tpu_grpo.engine.kv_formats import FP8
from tpu_grpo.engine.native_attention import CutNativeAttention, check_soft_cap

AttentionName = Literal["flash", "gather", "native"]
Columns = Mapping[str, np.ndarray]
"""The padded per-row and per-token arrays of a prefill step, by their names in StepInputs."""
NO_SLOTS = np.zeros(0, np.int32)


class AttentionMode(Protocol):
    """Decides how the rows of a step find their cached keys and values."""

    def library_backend(self) -> Any:
        """Return the object that ModelRunner keeps as its attention backend."""
        ...

    def cache_layer(self, pool: MHATokenToKVPool) -> jax.ShapeDtypeStruct:
        """Describe a layer of the cache as this attention lays it out."""
        ...

    def cache_loc(self, slots_bL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """Concatenate the cache slots of all rows; the array is empty for a backend that does not read it."""
        ...

    def prefill_metadata(
        self, columns: Columns, slots_bL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> Any:
        """Build the pytree of arrays that the backend needs in a prefill step."""
        ...

    def launch_metadata(self, slots_bL: Int[np.ndarray, "b L"], ends_B: Int[np.ndarray, " B"]) -> Any:
        """Build the pytree of arrays for the decode steps of a launch, in which a row gets at most ``ends`` tokens."""
        ...

    def at_step(self, metadata: Any, seq_lens_B: Int[Array, " B"]) -> tuple[Any, Int[Array, " S"]]:
        """Trace the metadata of one decode step, and its cache_loc; rows of length 0 write nothing that is read."""
        ...

    def backend(self, metadata: Any) -> Any:
        """Make the backend that the traced step calls."""
        ...


class GatherMode:
    """Our attention: each row gathers its own pages. It runs on any device with any page size."""

    def __init__(self, page_size: int, head_dim: int):
        self._page_size, self._head_dim = page_size, head_dim

    def cache_layer(self, pool: MHATokenToKVPool) -> jax.ShapeDtypeStruct:
        """Describe a layer with heads of the model's width; the library's would be padded to 128."""
        return gather_attention.cache_layer(pool, self._head_dim)

    def library_backend(self) -> Any:
        """Return a placeholder, because the backend is built inside the step."""
        return _NoBackend()

    def cache_loc(self, slots_bL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """Return an empty array, because this backend reads pages instead."""
        del slots_bL, seq_lens_B
        return NO_SLOTS

    def prefill_metadata(
        self, columns: Columns, slots_bL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> Any:
        """List the pages of each row and its query blocks."""
        del cache_loc
        pages = self._pages(slots_bL, len(columns["seq_lens"]))
        return block_metadata(pages, columns["extend_lens"], len(columns["input_ids"]))

    def launch_metadata(self, slots_bL: Int[np.ndarray, "b L"], ends_B: Int[np.ndarray, " B"]) -> Any:
        """List the pages of each row."""
        return decode_metadata(self._pages(slots_bL, len(ends_B)))

    def at_step(self, metadata: Any, seq_lens_B: Int[Array, " B"]) -> tuple[Any, Int[Array, " S"]]:
        """Return the pages, which serve every step, because the backend reads as many as the rows are long."""
        del seq_lens_B
        return metadata, jnp.zeros(0, jnp.int32)

    def _pages(self, slots_bL: Int[np.ndarray, "b L"], rows: int) -> Int[np.ndarray, "{rows} N"]:
        pages = np.zeros((rows, -(-slots_bL.shape[1] // self._page_size)), np.int32)
        pages[: len(slots_bL)] = slots_bL[:, :: self._page_size] // self._page_size
        return pages

    def backend(self, metadata: Any) -> Any:
        """Build GatherAttention around the traced metadata."""
        return GatherAttention(self._page_size, metadata)


class NativeMode:
    """The library's reference attention, which scores every query against every row's cache."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner

    def library_backend(self) -> Any:
        """Return the library's NativeAttention.

        Raises:
            ConfigError: for a model that caps its scores.
        """
        check_soft_cap(self._runner.model_config.hf_config)
        return CutNativeAttention(self._runner.num_attn_heads, self._runner.num_kv_heads, self._runner.mesh)

    def cache_layer(self, pool: MHATokenToKVPool) -> jax.ShapeDtypeStruct:
        """Describe a layer as the library does, whose heads are padded to multiples of 128, and rows to 32 bits."""
        packing, tensor = 4 // np.dtype(pool.dtype).itemsize, pool.mesh.shape["tensor"]
        pages = (pool.size + pool.page_size) // pool.page_size
        words = tensor * -(-2 * pool.head_num // tensor // packing)
        shape = (pages, pool.page_size, words, packing, pool.head_dim)
        sharding = NamedSharding(pool.mesh, P("data", None, "tensor", None, None))
        return jax.ShapeDtypeStruct(shape, pool.dtype, sharding=sharding)

    def cache_loc(self, slots_bL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """Concatenate the slots of all rows, each rounded up to whole pages; the rest of the array is 0."""
        real_b, page = seq_lens_B[: len(slots_bL)], self._runner.page_size
        position = np.arange(slots_bL.shape[1])
        wanted = position < (-(-real_b // page) * page)[:, None]
        values = np.where(position < real_b[:, None], slots_bL, 0)[wanted]
        concatenated = np.zeros(len(seq_lens_B) * slots_bL.shape[1], np.int32)
        concatenated[: len(values)] = values
        return concatenated

    def prefill_metadata(
        self, columns: Columns, slots_bL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> Any:
        """Let the library compute its metadata, from a batch with only the fields that it reads."""
        del slots_bL
        batch = ModelWorkerBatch.__new__(ModelWorkerBatch)
        batch.forward_mode, batch.cache_loc = ForwardMode.EXTEND, cache_loc
        batch.seq_lens, batch.extend_seq_lens = columns["seq_lens"], columns["extend_lens"]
        return self._runner.attn_backend.get_forward_metadata(batch)

    def launch_metadata(self, slots_bL: Int[np.ndarray, "b L"], ends_B: Int[np.ndarray, " B"]) -> Any:
        """List the slots of all rows."""
        slots_BL = np.zeros((len(ends_B), slots_bL.shape[1]), np.int32)
        slots_BL[: len(slots_bL)] = slots_bL
        return slots_BL

    def at_step(self, metadata: Any, seq_lens_B: Int[Array, " B"]) -> tuple[Any, Int[Array, " S"]]:
        """Concatenate the slots as ``cache_loc`` does; the backend looks for a row after those before it."""
        page, position_L = self._runner.page_size, jnp.arange(metadata.shape[1])
        whole_B = -(-seq_lens_B // page) * page
        starts_B = jnp.cumsum(whole_B) - whole_B
        place_BL = jnp.where(position_L < whole_B[:, None], starts_B[:, None] + position_L, metadata.size)
        values_BL = jnp.where(position_L < seq_lens_B[:, None], metadata, 0)
        return None, jnp.zeros(metadata.size, jnp.int32).at[place_BL].set(values_BL, mode="drop")

    def backend(self, metadata: Any) -> Any:
        """Make a new backend, because flax forbids changing a module in a trace that began after it was made."""
        del metadata
        return self.library_backend()


class FlashMode(NativeMode):
    """sglang-jax's Pallas kernel, which runs on TPUs only. It writes new keys and values at the end of each row."""

    def cache_layer(self, pool: MHATokenToKVPool) -> jax.ShapeDtypeStruct:
        """Describe a layer as the kernel takes it.

        Raises:
            ConfigError: for fp8 where the devices cannot read it, or where it would save nothing.
        """
        if pool.dtype == FP8:
            own, device = pool.head_num // pool.mesh.shape["tensor"], pool.mesh.devices.flat[0]
            check_fp8(own, jnp.dtype(self._runner.dtype), device.device_kind)
        return super().cache_layer(pool)

    def prefill_metadata(
        self, columns: Columns, slots_bL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> FlashAttentionMetadata:
        """Compute the library's metadata on the host; it goes to the devices with the other inputs of the step."""
        del slots_bL
        rows = int(np.sum(columns["seq_lens"] > 0))
        return self._metadata(columns["seq_lens"], columns["extend_lens"], cache_loc, (0, rows, rows))

    def launch_metadata(self, slots_bL: Int[np.ndarray, "b L"], ends_B: Int[np.ndarray, " B"]) -> Any:
        """Compute the library's metadata for rows as long as they may get; the pages stay during a launch.

        Padding between rows gets a page to itself, page 0, as rows that have ended do.
        """
        rows = int(np.max(np.nonzero(ends_B)[0], initial=-1)) + 1
        ends_B = np.where((np.arange(len(ends_B)) < rows) & (ends_B == 0), 1, ends_B).astype(np.int32)
        return self._metadata(ends_B, np.ones_like(ends_B), self.cache_loc(slots_bL, ends_B), (rows, rows, rows))

    def at_step(self, metadata: Any, seq_lens_B: Int[Array, " B"]) -> tuple[Any, Int[Array, " S"]]:
        """Set the rows' lengths. Rows that have ended become rows of one token in page 0, which is nobody's.

        They must not have length 0: the kernel writes the key and value of each row that it counts.
        """
        rows_B = jnp.arange(len(seq_lens_B))
        ended_B = (rows_B < metadata.distribution[0]) & (seq_lens_B == 0)
        first_B, nowhere = metadata.cu_kv_lens[:-1] // self._runner.page_size, metadata.page_indices.size
        pages = metadata.page_indices.at[jnp.where(ended_B, first_B, nowhere)].set(0, mode="drop")
        lengths = jnp.where(ended_B, 1, seq_lens_B)
        return replace(metadata, page_indices=pages, seq_lens=lengths), jnp.zeros(0, jnp.int32)

    def _metadata(
        self,
        seq_lens_B: Int[np.ndarray, " B"],
        new_B: Int[np.ndarray, " B"],
        cache_loc: Int[np.ndarray, " S"],
        ends: tuple[int, int, int],
    ) -> FlashAttentionMetadata:
        """Build the library's metadata; ``ends`` are where decode rows, prefill rows and mixed rows end."""
        page = self._runner.page_size
        arrays: dict[str, Any] = {
            "cu_q_lens": _starts(new_B),
            "cu_kv_lens": _starts(-(-seq_lens_B // page) * page),
            "page_indices": cache_loc[::page] // page,
            "seq_lens": seq_lens_B,
            "distribution": np.array(ends, np.int32),
        }
        return FlashAttentionMetadata(**arrays)

    def library_backend(self) -> Any:
        """Return the library's FlashAttention with our blocks."""
        runner = self._runner
        heads = (runner.num_attn_heads, runner.num_kv_heads, runner.model_config.head_dim)
        return BlockedFlashAttention(*heads, page_size=runner.page_size, mesh=runner.mesh)

    def backend(self, metadata: Any) -> Any:
        """Make a new backend that holds the metadata."""
        backend = self.library_backend()
        backend.forward_metadata = metadata
        return backend


def _starts(lengths_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B+1"]:
    """Return where each row begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths_B, dtype=np.int32)])


class _NoBackend:
    """Stands in for a backend while the library builds its worker."""

    @staticmethod
    def get_max_running_reqests(max_context_len: int, page_size: int) -> int:
        """Set no limit on how many rows run at once. The spelling is the library's."""
        del max_context_len, page_size
        return 1 << 20
