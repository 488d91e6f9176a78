"""Cache slots for several decode steps, taken from the scheduler's own allocator before a launch.

The scheduler gives every row of a decode batch the slot of one token. ``reserve`` takes slots for the following tokens,
for as many steps as there are free slots, and ``keep`` frees the slots that a launch did not use. A launch ends where
single steps would have evicted prefixes or retracted rows (put them back into the queue). So the scheduler evicts,
retracts and admits exactly as it would after single steps.

    reservation = reserve(batch, most_steps=16, left=8)
    ...                                     # the launch
    keep(batch, reservation, counts)        # the tokens that each row has sampled

While no request waits, the next launch is queued before the tokens of the current launch are known. ``reserve_ahead``
takes the next launch's slots, as if no row ended, and ``give_back`` frees the slots of rows that have ended.

Suffixes: b rows of the batch (B padded), k steps of the launch, T tokens, L layers, K experts per token.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Integer
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class Reservation:
    """The cache slots that the rows of a launch may fill."""

    slots: Int[np.ndarray, "b k"]
    """The cache slot of each step's input token; -1 for steps after the row's last one."""
    lengths: Int[np.ndarray, " b"]
    """Tokens that each row has after the first step."""
    ends: Int[np.ndarray, " b"]
    """Tokens that each row has after all steps for which it has slots."""
    left: int
    """The launch ends early when this number of rows, or fewer, are running."""
    columns: Int[np.ndarray, " b"]
    """The index of each row in the arrays on the devices. A launch that continues another launch keeps the indices."""

    @property
    def steps(self) -> int:
        """The most steps of the launch."""
        return self.slots.shape[1]

    @property
    def places(self) -> Int[np.ndarray, "b k"]:
        """The position of each step's input token in its row."""
        return self.lengths[:, None] - 1 + np.arange(self.steps)

    def of(self, rows: Bool[np.ndarray, " b"]) -> "Reservation":
        """Return the reservation of only these rows."""
        return Reservation(self.slots[rows], self.lengths[rows], self.ends[rows], self.left, self.columns[rows])


def reserve(batch: ScheduleBatch, most_steps: int, left: int) -> Reservation:
    """Reserve slots for up to ``most_steps`` steps of a decode batch, whose rows have a slot for their first token.

    A row gets at most one slot for each token that its request may still sample. ``left``: see `Reservation`.
    """
    lengths_b, limits_b = np.asarray(batch.seq_lens), _limits(batch)
    steps = _affordable(batch, lengths_b, limits_b, most_steps)
    ends_b = lengths_b + np.minimum(limits_b, steps) - 1
    _allocate(batch, lengths_b, ends_b)
    count_allocated(batch, lengths_b, ends_b)
    return _reservation(batch, lengths_b, ends_b, steps, left, np.arange(len(lengths_b)))


def reserve_ahead(batch: ScheduleBatch, before: Reservation, most_steps: int) -> Reservation | None:
    """Reserve slots for the launch after the current one; None if no row needs it, or if either launch lacks slots.

    ``before`` is the reservation of the launch in flight. Slots are taken only for rows that may continue, and written
    into the library's request table.
    """
    limits_b = np.maximum(before.lengths + _limits(batch) - 1 - before.ends, 0)
    steps = min(most_steps, int(limits_b.max()))
    if not steps or before.steps < most_steps:
        return None
    ends_b = before.ends + np.minimum(limits_b, steps)
    page, free = batch.token_to_kv_pool_allocator.page_size, batch.token_to_kv_pool_allocator.available_size()
    if (-(-ends_b // page) - -(-before.ends // page)).sum() + len(ends_b) > free // page:
        return None
    _allocate(batch, before.ends, ends_b)
    return _reservation(batch, before.ends + 1, ends_b, steps, before.left, before.columns)


def give_back(batch: ScheduleBatch, ahead: Reservation) -> None:
    """Free the slots of rows that a launch queued ahead will not decode; ``ahead`` is the reservation of these rows.

    A page that the previous launch has partly filled is not freed: it belongs to that launch's reservation.
    """
    allocator = batch.token_to_kv_pool_allocator
    first_b = -(-(ahead.lengths - 1) // allocator.page_size) * allocator.page_size
    allocator.free(ahead.slots[(ahead.slots >= 0) & (ahead.places >= first_b[:, None])])


def count_allocated(batch: ScheduleBatch, lengths_b: Int[np.ndarray, " b"], ends_b: Int[np.ndarray, " b"]) -> None:
    """Set the allocated length of requests to the end of their reserved slots."""
    for req, more in zip(batch.reqs, (ends_b - lengths_b).tolist(), strict=True):
        req.kv_allocated_len += more


def keep(batch: ScheduleBatch, reservation: Reservation, counts_b: Int[np.ndarray, " b"]) -> None:
    """Record that each row has sampled ``counts`` tokens, at least one, and free the slots that no token took."""
    page, first_b = batch.token_to_kv_pool_allocator.page_size, np.asarray(batch.seq_lens)
    ends_b = first_b + counts_b - 1
    unused = (reservation.slots >= 0) & (reservation.places >= (-(-ends_b // page) * page)[:, None])
    batch.token_to_kv_pool_allocator.free(reservation.slots[unused])
    for req, more in zip(batch.reqs, (counts_b - 1).tolist(), strict=True):
        req.kv_committed_len += more
        req.kv_allocated_len = req.kv_committed_len
    batch.seq_lens = ends_b.astype(first_b.dtype)
    batch.seq_lens_sum = int(ends_b.sum())


def computed_experts(
    batch: ScheduleBatch,
    reservation: Reservation | None,
    counts_b: Int[np.ndarray, " b"],
    experts: Integer[np.ndarray, "*tokens L K"],
) -> tuple[Int[np.ndarray, " T"], Integer[np.ndarray, "T L K"]]:
    """Return the cache slots of the tokens that were computed, and their experts.

    ``experts`` have the shape [k, B, L, K] for a launch and [T, L, K] for a prefill step, which has no reservation.
    """
    if reservation is None:
        return batch.out_cache_loc, experts[: len(batch.out_cache_loc)]
    taken = np.arange(reservation.steps) < counts_b[:, None]
    by_row = experts[: reservation.steps, reservation.columns].swapaxes(0, 1)
    return reservation.slots[taken], by_row[taken]


def _limits(batch: ScheduleBatch) -> Int[np.ndarray, " b"]:
    """Return how many tokens each row may still sample, not counting tokens that the host has not collected yet.

    A row whose limit was lowered below its token count (a `Cutoff`) samples one more token.
    """
    return np.array([max(1, req.sampling_params.max_new_tokens - len(req.output_ids)) for req in batch.reqs])


def _reservation(
    batch: ScheduleBatch,
    lengths_b: Int[np.ndarray, " b"],
    ends_b: Int[np.ndarray, " b"],
    steps: int,
    left: int,
    columns_b: Int[np.ndarray, " b"],
) -> Reservation:
    """Make a reservation of the slots that the request table has for the steps."""
    places, table = lengths_b[:, None] - 1 + np.arange(steps), batch.req_to_token_pool.req_to_token
    slots = table[batch.req_pool_indices[:, None], np.minimum(places, table.shape[1] - 1)]
    return Reservation(np.where(places < ends_b[:, None], slots, -1), lengths_b, ends_b, left, columns_b)


def _affordable(
    batch: ScheduleBatch, lengths_b: Int[np.ndarray, " b"], limits_b: Int[np.ndarray, " b"], most_steps: int
) -> int:
    """Return the most steps that the library would make without evicting; the first step has its slots already.

    The library evicts when fewer pages are free than there are rows.
    """
    page, rows = batch.token_to_kv_pool_allocator.page_size, len(lengths_b)
    steps_k1 = np.arange(1, min(most_steps, int(limits_b.max())) + 1)[:, None]
    ends_kb = lengths_b + np.minimum(limits_b, steps_k1) - 1
    pages_k = (-(-ends_kb // page) - -(-lengths_b // page)).sum(1)
    free = batch.token_to_kv_pool_allocator.available_size() // page
    return 1 + int(np.searchsorted(pages_k[:-1] + rows, free, side="right"))


def _allocate(batch: ScheduleBatch, lengths_b: Int[np.ndarray, " b"], ends_b: Int[np.ndarray, " b"]) -> None:
    """Take slots for the tokens of each row from its length to its end, and write them into the request table."""
    allocator, table = batch.token_to_kv_pool_allocator, batch.req_to_token_pool.req_to_token
    more_b = ends_b - lengths_b
    page, total = allocator.page_size, int(more_b.sum())
    if not total:
        return
    rows, starts = np.repeat(batch.req_pool_indices, more_b), np.repeat(np.cumsum(more_b) - more_b, more_b)
    places = np.repeat(lengths_b, more_b) + np.arange(total) - starts
    if page == 1:
        slots = allocator.alloc(total)
    else:
        last = table[batch.req_pool_indices, lengths_b - 1]
        slots = allocator.alloc_extend(lengths_b.tolist(), ends_b.tolist(), last.tolist(), total)
    assert slots is not None, f"{total} cache slots must be free, {allocator.available_size()} tokens are"
    table[rows, places] = slots
