"""Pads a scheduled batch to the arrays of one step.

Suffixes: B rows (padded), b rows of the batch, T tokens of the step (padded), L context.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

from tpu_grpo.rollout.arrays import AnyArray
from tpu_grpo.rollout.attention import AttentionMode, Columns
from tpu_grpo.rollout.sampling import SamplingColumns
from tpu_grpo.rollout.shapes import Shapes, pad_to
from tpu_grpo.types import Request


class StepInputs(NamedTuple):
    """The arrays that one step needs on the devices; all of them are replicated."""

    input_ids: Int[AnyArray, " T"]
    positions: Int[AnyArray, " T"]
    out_cache_loc: Int[AnyArray, " T"]
    """The cache slot of each new token, or -1 for padding."""
    seq_lens: Int[AnyArray, " B"]
    """Tokens that each row has after this step, or 0 for padding."""
    prefix_lens: Int[AnyArray, " B"]
    extend_lens: Int[AnyArray, " B"]
    cache_loc: Int[AnyArray, " S"]
    """The concatenated cache slots of all rows; empty for gather attention."""
    attention: Any
    """The attention backend's metadata."""
    sampling: SamplingColumns


class InputBuilder:
    """Pads batches to the engine's shapes, and remembers how each running request is sampled."""

    def __init__(self, shapes: Shapes, attention: AttentionMode):
        self._shapes = shapes
        self._attention = attention
        rows = shapes.max_rows + 2  # one more than the library's request table, for padding
        self._table = SamplingColumns(
            *(np.zeros(rows, dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)),
            key=np.zeros((rows, 4), np.uint32),
            position=np.zeros(rows, np.int32),
        )

    def admit(self, row: int, request: Request) -> None:
        """Note the sampling settings of the request that now holds row ``row`` of the library's request table."""
        sampling, key = request.sampling, request.key
        self._table.temperature[row] = sampling.temperature
        self._table.top_k[row] = sampling.top_k
        self._table.top_p[row] = sampling.top_p
        self._table.min_p[row] = sampling.min_p
        self._table.key[row] = (key.seed, key.step, key.prompt, key.sample)

    def build(self, batch: ScheduleBatch) -> StepInputs:
        """Build the inputs of a scheduled batch."""
        mode = batch.forward_mode
        columns = self._decode_columns(batch) if mode.is_decode() else self._prefill_columns(batch)
        slots_bL = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, : self._shapes.context]
        return self._inputs(mode, columns, slots_bL, batch.req_pool_indices)

    def padding(self, mode: ForwardMode, size: int) -> StepInputs:
        """Build inputs of one shape that hold nothing but padding, for compiling."""
        rows = size if mode == ForwardMode.DECODE else self._shapes.max_rows
        columns = {name: np.zeros(size, np.int32) for name in ("input_ids", "positions")}
        columns |= {name: np.zeros(rows, np.int32) for name in ("seq_lens", "prefix_lens", "extend_lens")}
        columns["out_cache_loc"] = np.full(size, -1, np.int32)
        return self._inputs(mode, columns, np.zeros((0, self._shapes.context), np.int32), np.zeros(0, np.int32))

    def _decode_columns(self, batch: ScheduleBatch) -> Columns:
        """Pad a decode step, which has one token per row."""
        rows = pad_to(self._shapes.batch, len(batch.seq_lens))
        seq_lens = _padded(batch.seq_lens, rows)
        ones = (seq_lens > 0).astype(np.int32)
        return {
            "input_ids": _padded(batch.input_ids, rows),
            "positions": np.maximum(seq_lens - 1, 0),
            "out_cache_loc": _padded(batch.out_cache_loc, rows, fill=-1),
            "seq_lens": seq_lens,
            "prefix_lens": seq_lens - ones,
            "extend_lens": ones,
        }

    def _prefill_columns(self, batch: ScheduleBatch) -> Columns:
        """Pad a prefill step, which has the new tokens of its rows concatenated."""
        rows, tokens = self._shapes.max_rows, pad_to(self._shapes.prefill, len(batch.input_ids))
        positions = np.concatenate([np.arange(p, s) for p, s in zip(batch.prefix_lens, batch.seq_lens, strict=True)])
        return {
            "input_ids": _padded(batch.input_ids, tokens),
            "positions": _padded(positions, tokens),
            "out_cache_loc": _padded(batch.out_cache_loc, tokens, fill=-1),
            "seq_lens": _padded(batch.seq_lens, rows),
            "prefix_lens": _padded(batch.prefix_lens, rows),
            "extend_lens": _padded(batch.extend_lens, rows),
        }

    def _inputs(
        self,
        mode: ForwardMode,
        columns: Columns,
        slots_bL: Int[np.ndarray, "b L"],
        table_rows_b: Int[np.ndarray, " b"],
    ) -> StepInputs:
        cache_loc = self._attention.cache_loc(slots_bL, columns["seq_lens"])
        return StepInputs(
            **columns,
            cache_loc=cache_loc,
            attention=self._attention.metadata(mode, columns, slots_bL, cache_loc),
            sampling=self._sampling(table_rows_b, columns["seq_lens"]),
        )

    def _sampling(self, table_rows_b: Int[np.ndarray, " b"], seq_lens_B: Int[np.ndarray, " B"]) -> SamplingColumns:
        rows_B = np.full(len(seq_lens_B), self._shapes.max_rows + 1)
        rows_B[: len(table_rows_b)] = table_rows_b
        columns = SamplingColumns(*(column[rows_B] for column in self._table))
        return columns._replace(position=seq_lens_B)


def _padded(values: Sequence[int] | np.ndarray, size: int, fill: int = 0) -> Int[np.ndarray, " size"]:
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded
