"""The attention modes of an engine: what each needs of a scheduled batch, and the backend it runs in the step.

Suffixes: B rows (padded), L context, S cache slots of all rows.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttentionMetadata
from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.model_executor.model_runner import ModelRunner

from tpu_grpo.rollout import repairs
from tpu_grpo.rollout.flash_attention import PaddedFlashAttention
from tpu_grpo.rollout.gather_attention import GatherAttention, block_metadata, decode_metadata

Columns = Mapping[str, np.ndarray]
"""The padded per-row and per-token arrays of a step, by their names in StepInputs."""
NO_SLOTS = np.zeros(0, np.int32)


class AttentionMode(Protocol):
    """How rows find their cached keys and values."""

    def library_backend(self) -> Any:
        """What stands in ModelRunner's slot for a backend."""
        ...

    def cache_loc(self, slots_BL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """All rows' cache slots in one array, if the backend reads that."""
        ...

    def metadata(
        self, mode: ForwardMode, columns: Columns, slots_BL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> Any:
        """What the backend needs of this step, as a pytree of arrays."""
        ...

    def backend(self, metadata: Any) -> Any:
        """The backend inside the traced step."""
        ...


class Gather:
    """Ours: each row gathers its own pages. Any device, any page size."""

    def __init__(self, page_size: int):
        self._page_size = page_size

    def library_backend(self) -> Any:
        """Nothing: the backend is built inside the step."""
        return _NoBackend()

    def cache_loc(self, slots_BL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """None: pages are read instead."""
        del slots_BL, seq_lens_B
        return NO_SLOTS

    def metadata(
        self, mode: ForwardMode, columns: Columns, slots_BL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> Any:
        """Each row's pages, and for a prefill its query blocks."""
        del cache_loc
        pages = np.zeros((len(columns["seq_lens"]), -(-slots_BL.shape[1] // self._page_size)), np.int32)
        pages[: len(slots_BL)] = slots_BL[:, :: self._page_size] // self._page_size
        if mode == ForwardMode.DECODE:
            return decode_metadata(pages)
        return block_metadata(pages, columns["extend_lens"], len(columns["input_ids"]))

    def backend(self, metadata: Any) -> Any:
        """Holds the traced metadata."""
        return GatherAttention(self._page_size, metadata)


class Native:
    """The library's reference attention: every query against every row's cache; pages of one token."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner

    def library_backend(self) -> Any:
        """The library's class."""
        return repairs.import_native_attention()(self._runner.num_attn_heads, self._runner.num_kv_heads)

    def cache_loc(self, slots_BL: Int[np.ndarray, "b L"], seq_lens_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " S"]:
        """Each row's slots up to whole pages, one row after the other; the rest is 0."""
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
        """By the library, from the part of its batch that it reads."""
        del slots_BL
        batch = ModelWorkerBatch.__new__(ModelWorkerBatch)
        batch.forward_mode, batch.cache_loc = mode, cache_loc
        batch.seq_lens, batch.extend_seq_lens = columns["seq_lens"], columns["extend_lens"]
        return self._runner.attn_backend.get_forward_metadata(batch)

    def backend(self, metadata: Any) -> Any:
        """Made anew: flax lets nobody change a module inside a trace that began later."""
        del metadata
        return self.library_backend()


class Flash(Native):
    """sglang-jax's Pallas kernel (TPU)."""

    def metadata(
        self, mode: ForwardMode, columns: Columns, slots_BL: Int[np.ndarray, "b L"], cache_loc: Int[np.ndarray, " S"]
    ) -> FlashAttentionMetadata:
        """As the library's, but on the host: it goes to the devices with the step's other inputs."""
        del slots_BL
        page, seq_lens = self._runner.page_size, columns["seq_lens"]
        decodes = mode == ForwardMode.DECODE
        rows = np.sum(seq_lens > 0, dtype=np.int32)
        arrays: dict[str, Any] = {
            "num_seqs": rows.reshape(1),
            "cu_q_lens": _starts(np.ones_like(seq_lens) if decodes else columns["extend_lens"]),
            "cu_kv_lens": _starts(-(-seq_lens // page) * page),
            "page_indices": cache_loc[::page] // page,
            "seq_lens": seq_lens,
            "distribution": np.array([0, 0 if decodes else rows, rows], np.int32),  # ends of decodes, prefills, mixed
        }
        return FlashAttentionMetadata(**arrays)

    def library_backend(self) -> Any:
        """The library's class, for heads as wide as the cache's."""
        runner = self._runner
        head_dim, page_size = runner.token_to_kv_pool.head_dim, runner.page_size
        return PaddedFlashAttention(
            runner.num_attn_heads, runner.num_kv_heads, head_dim, page_size=page_size, mesh=runner.mesh
        )

    def backend(self, metadata: Any) -> Any:
        """With its metadata."""
        backend = self.library_backend()
        backend.forward_metadata = metadata
        return backend


def _starts(lengths_B: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B+1"]:
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths_B, dtype=np.int32)])


class _NoBackend:
    """No limit of its own on how many rows run at once (the library's spelling)."""

    @staticmethod
    def get_max_running_reqests(max_context_len: int, page_size: int) -> int:
        del max_context_len, page_size
        return 1 << 20
