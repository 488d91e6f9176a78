"""Pads a scheduled batch to the arrays of a prefill step, or of a launch of decode steps.

Suffixes: B rows (padded), b rows of the batch, T tokens of the step (padded), L context, k the most steps of a launch.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Int
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

from tpu_grpo.engine.attention import AttentionMode, Columns
from tpu_grpo.engine.decode_loop import LaunchInputs, LaunchRows, pack_rows
from tpu_grpo.engine.reservation import Reservation
from tpu_grpo.engine.sampling import SamplingColumns
from tpu_grpo.engine.shapes import Shapes, pad_to
from tpu_grpo.engine.step_arrays import StepInputs
from tpu_grpo.records.stages import Request


class InputBuilder:
    """Pads batches to the engine's shapes, and remembers how each running request is sampled."""

    def __init__(self, shapes: Shapes, attention: AttentionMode, steps_per_launch: int):
        self._shapes = shapes
        self._attention = attention
        self._steps = steps_per_launch
        rows = shapes.max_rows + 2  # one more than the library's request table, for padding
        self._stops = np.zeros(rows, np.bool_)
        self._table = SamplingColumns(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            key=np.zeros((rows, 4), np.uint32),
            position=np.zeros(rows, np.int32),
        )

    def admit(self, row: int, request: Request) -> None:
        """Note the sampling settings of the request that now holds row ``row`` of the library's request table."""
        sampling, key = request.sampling, request.key
        self._stops[row] = not sampling.ignore_stop
        self._table.temperature[row] = sampling.temperature
        self._table.top_k[row] = sampling.top_k
        self._table.top_p[row] = sampling.top_p
        self._table.min_p[row] = sampling.min_p
        self._table.key[row] = (key.seed, key.step, key.prompt, key.sample)

    def prefill(self, batch: ScheduleBatch) -> StepInputs:
        """Build the inputs of a prefill step, which has the new tokens of its rows concatenated."""
        rows, tokens = self._shapes.max_rows, pad_to(self._shapes.prefill, len(batch.input_ids))
        positions = np.concatenate([np.arange(p, s) for p, s in zip(batch.prefix_lens, batch.seq_lens, strict=True)])
        columns = {
            "input_ids": _padded(batch.input_ids, tokens),
            "positions": _padded(positions, tokens),
            "out_cache_loc": _padded(batch.out_cache_loc, tokens, fill=-1),
            "seq_lens": _padded(batch.seq_lens, rows),
            "prefix_lens": _padded(batch.prefix_lens, rows),
            "extend_lens": _padded(batch.extend_lens, rows),
        }
        return self._prefill(columns, self._slots(batch), batch.req_pool_indices)

    def launch(
        self, batch: ScheduleBatch, reservation: Reservation, before: Int[Array, "2 B"] | None = None
    ) -> LaunchInputs:
        """Build the inputs of a launch of decode steps; ``before`` is what the launch left that it follows, if any."""
        follows, places = before is not None, reservation.columns
        rows = len(before[0]) if before is not None else pad_to(self._shapes.batch, len(places))
        slots = np.full((rows, self._steps), -1, np.int32)
        slots[places, : reservation.steps] = reservation.slots
        table_rows = _placed(batch.req_pool_indices, places, rows, fill=self._shapes.max_rows + 1)
        columns = LaunchRows(
            token=np.zeros(rows, np.int32) if follows else _padded(batch.input_ids, rows),
            length=_placed(reservation.lengths, places, rows),
            stops=self._stops[table_rows],
            sampling=self._sampling(table_rows),
            slots=slots,
        )
        filled = self._slots(batch)
        if follows:  # else rows lie one after the other, and need no copy
            filled = _placed(filled, places, rows)
        metadata = self._attention.launch_metadata(filled, _placed(reservation.ends, places, rows))
        control = np.array([reservation.steps, reservation.left, follows], np.int32)
        return LaunchInputs(pack_rows(columns), control, metadata, _nothing_before(rows) if before is None else before)

    def padding(self, mode: ForwardMode, size: int) -> StepInputs | LaunchInputs:
        """Build inputs of one shape that hold nothing but padding, for compiling."""
        nothing, none = np.zeros((0, self._shapes.context), np.int32), np.zeros(0, np.int32)
        if mode == ForwardMode.DECODE:
            zeros, slots = np.zeros(size, np.int32), np.full((size, self._steps), -1, np.int32)
            table_rows = self._table_rows(none, size)
            rows = LaunchRows(zeros, zeros, self._stops[table_rows], self._sampling(table_rows), slots)
            metadata, control = self._attention.launch_metadata(nothing, zeros), np.zeros(3, np.int32)
            return LaunchInputs(pack_rows(rows), control, metadata, _nothing_before(size))
        columns = {name: np.zeros(size, np.int32) for name in ("input_ids", "positions")}
        columns |= {name: np.zeros(self._shapes.max_rows, np.int32) for name in ("seq_lens", "prefix_lens")}
        columns |= {"extend_lens": columns["seq_lens"], "out_cache_loc": np.full(size, -1, np.int32)}
        return self._prefill(columns, nothing, none)

    def _prefill(
        self, columns: Columns, slots_bL: Int[np.ndarray, "b L"], table_rows_b: Int[np.ndarray, " b"]
    ) -> StepInputs:
        seq_lens = columns["seq_lens"]
        cache_loc = self._attention.cache_loc(slots_bL, seq_lens)
        sampling = self._sampling(self._table_rows(table_rows_b, len(seq_lens)))
        return StepInputs(
            **columns,
            cache_loc=cache_loc,
            attention=self._attention.prefill_metadata(columns, slots_bL, cache_loc),
            sampling=sampling._replace(position=seq_lens),
        )

    def _slots(self, batch: ScheduleBatch) -> Int[np.ndarray, "b L"]:
        return batch.req_to_token_pool.req_to_token[batch.req_pool_indices, : self._shapes.context]

    def _table_rows(self, table_rows_b: Int[np.ndarray, " b"], rows: int) -> Int[np.ndarray, " {rows}"]:
        """Point padding to the table's last row, which is greedy without filters."""
        table_rows = np.full(rows, self._shapes.max_rows + 1)
        table_rows[: len(table_rows_b)] = table_rows_b
        return table_rows

    def _sampling(self, table_rows_B: Int[np.ndarray, " B"]) -> SamplingColumns:
        return SamplingColumns(*(column[table_rows_B] for column in self._table))


def _nothing_before(rows: int) -> Int[np.ndarray, "2 {rows}"]:
    return np.zeros((2, rows), np.int32)


def _placed(
    values_b: Int[np.ndarray, "b *rest"], places_b: Int[np.ndarray, " b"], size: int, fill: int = 0
) -> Int[np.ndarray, "{size} *rest"]:
    placed = np.full((size, *values_b.shape[1:]), fill, np.int32)
    placed[places_b] = values_b
    return placed


def _padded(values: Sequence[int] | np.ndarray, size: int, fill: int = 0) -> Int[np.ndarray, " size"]:
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded
