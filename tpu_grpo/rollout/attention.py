"""The attention modes of an engine: what each takes from a scheduled batch, and the backend it runs in the step.

Suffixes: B rows (padded), L context, S cache slots of all rows.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttentionMetadata
from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner

from tpu_grpo.rollout import gather_attention
from tpu_grpo.rollout.flash_attention import BlockedFlashAttention
from tpu_grpo.rollout.gather_attention import GatherAttention, block_metadata, decode_metadata
from tpu_grpo.rollout.native_attention import CutNativeAttention, check_soft_cap

AttentionName = Literal["flash", "gather", "native"]
Columns = Mapping[str, np.ndarray]
"""The padded per-row and per-token arrays of a step, by their names in StepInputs."""
NO_SLOTS = np.zeros(0, np.int32)


class AttentionMode(Protocol):
    """Decides how the rows of a step find their cached keys and values."""

    def library_backend(self) -> Any:
        """Return the object that ModelRunner keeps as its attention backend."""
        ...

    def cache_layer(self, pool: MHATokenToKVPool) -> jax.ShapeDtypeStruct:
        """Describe a layer of the cache as this attention lays it out."""
        ...

    def cache_loc(self, slots_BL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """Concatenate the cache slots of all rows; the array is empty for a backend that does not read it."""
        ...

    def metadata(
        self, mode: ForwardMode, columns: Columns, slots_BL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> Any:
        """Build the pytree of arrays that the backend needs in this step."""
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

    def cache_loc(self, slots_BL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """Return an empty array, because this backend reads pages instead."""
        del slots_BL, seq_lens_B
        return NO_SLOTS

    def metadata(
        self, mode: ForwardMode, columns: Columns, slots_BL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> Any:
        """List the pages of each row and, for a prefill, its query blocks."""
        del cache_loc
        pages = np.zeros((len(columns["seq_lens"]), -(-slots_BL.shape[1] // self._page_size)), np.int32)
        pages[: len(slots_BL)] = slots_BL[:, :: self._page_size] // self._page_size
        if mode == ForwardMode.DECODE:
            return decode_metadata(pages)
        return block_metadata(pages, columns["extend_lens"], len(columns["input_ids"]))

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
        """Describe a layer as the library does, whose heads are padded to multiples of 128."""
        packing = 4 // np.dtype(pool.dtype).itemsize
        pages = (pool.size + pool.page_size) // pool.page_size
        shape = (pages, pool.page_size, pool.head_num * 2 // packing, packing, pool.head_dim)
        sharding = NamedSharding(pool.mesh, P("data", None, "tensor", None, None))
        return jax.ShapeDtypeStruct(shape, pool.dtype, sharding=sharding)

    def cache_loc(self, slots_BL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """Concatenate the slots of all rows, each rounded up to whole pages; the rest of the array is 0."""
        real_B, page = seq_lens_B[: len(slots_BL)], self._runner.page_size
        position = np.arange(slots_BL.shape[1])
        wanted = position < (-(-real_B // page) * page)[:, None]
        values = np.where(position < real_B[:, None], slots_BL, 0)[wanted]
        concatenated = np.zeros(len(seq_lens_B) * slots_BL.shape[1], np.int32)
        concatenated[: len(values)] = values
        return concatenated

    def metadata(
        self, mode: ForwardMode, columns: Columns, slots_BL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> Any:
        """Let the library compute its metadata, from a batch with only the fields that it reads."""
        del slots_BL
        batch = ModelWorkerBatch.__new__(ModelWorkerBatch)
        batch.forward_mode, batch.cache_loc = mode, cache_loc
        batch.seq_lens, batch.extend_seq_lens = columns["seq_lens"], columns["extend_lens"]
        return self._runner.attn_backend.get_forward_metadata(batch)

    def backend(self, metadata: Any) -> Any:
        """Make a new backend, because flax forbids changing a module in a trace that began after it was made."""
        del metadata
        return self.library_backend()


class FlashMode(NativeMode):
    """sglang-jax's Pallas kernel, which runs on TPUs only."""

    def metadata(
        self, mode: ForwardMode, columns: Columns, slots_BL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> FlashAttentionMetadata:
        """Compute the library's metadata on the host; it goes to the devices with the other inputs of the step."""
        del slots_BL
        page, seq_lens = self._runner.page_size, columns["seq_lens"]
        decodes = mode == ForwardMode.DECODE
        rows = np.sum(seq_lens > 0, dtype=np.int32)
        arrays: dict[str, Any] = {
            "cu_q_lens": _starts(np.ones_like(seq_lens) if decodes else columns["extend_lens"]),
            "cu_kv_lens": _starts(-(-seq_lens // page) * page),
            "page_indices": cache_loc[::page] // page,
            "seq_lens": seq_lens,
            "distribution": np.array(
                [rows if decodes else 0, rows, rows], np.int32
            ),  # ends of decodes, prefills, mixed
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
