"""Cache slots that are reserved for several steps, by hand, with the library's own allocators."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sgl_jax.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool

from tpu_grpo.engine.reservation import give_back, keep, reserve, reserve_ahead


def batch_of(lengths: list[int], new: list[int], free: int, page: int) -> Any:
    """A decode batch that has slots for its first token; ``new`` tokens may be sampled, and ``free`` slots are free."""
    pages = [-(-length // page) for length in lengths]
    size = (sum(pages) + free // page) * page
    kind: Any = TokenToKVPoolAllocator if page == 1 else PagedTokenToKVPoolAllocator
    allocator = kind(size, kvcache=None, **({} if page == 1 else {"page_size": page}))
    table = ReqToTokenPool(len(lengths), 32)
    for row, count in enumerate(pages):
        table.req_to_token[row, : count * page] = allocator.alloc(count * page)
    table.req_to_token *= np.arange(32) < np.array(lengths)[:, None]
    reqs = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(max_new_tokens=n),
            output_ids=[],
            kv_allocated_len=length,
            kv_committed_len=length,
        )
        for length, n in zip(lengths, new, strict=True)
    ]
    return SimpleNamespace(
        reqs=reqs,
        seq_lens=np.array(lengths),
        seq_lens_sum=sum(lengths),
        req_pool_indices=np.arange(len(lengths)),
        req_to_token_pool=table,
        token_to_kv_pool_allocator=allocator,
    )


@pytest.mark.parametrize(("page", "steps"), [(1, 5), (4, 5)])
def test_slots_are_reserved_and_given_back(page: int, steps: int) -> None:
    batch = batch_of([6, 3], new=[9, 2], free=64, page=page)
    allocator, table = batch.token_to_kv_pool_allocator, batch.req_to_token_pool.req_to_token
    before = allocator.available_size()
    reservation = reserve(batch, steps, left=0)
    assert reservation.steps == steps
    assert reservation.ends.tolist() == [10, 4]
    np.testing.assert_array_equal(reservation.slots[0], table[0, 5:10])
    np.testing.assert_array_equal(reservation.slots[1], [*table[1, 2:4], -1, -1, -1])
    taken = reservation.slots[reservation.slots >= 0].tolist()
    assert len(set(taken)) == len(taken) == 7
    assert before - allocator.available_size() == {1: 5, 4: 4}[page]  # tokens 7 to 10 and 4, or one page
    assert [req.kv_allocated_len for req in batch.reqs] == [10, 4]
    keep(batch, reservation, np.array([3, 1]))
    assert batch.seq_lens.tolist() == [8, 3]
    assert batch.seq_lens_sum == 11
    assert [(req.kv_allocated_len, req.kv_committed_len) for req in batch.reqs] == [(8, 8), (3, 3)]
    assert before - allocator.available_size() == {1: 2, 4: 0}[page]


@pytest.mark.parametrize("page", [1, 4])
def test_slots_for_the_next_launch_are_reserved_before_this_one_has_ended(page: int) -> None:
    """Rows of 6, 3 and 5 tokens; the second ends with this launch of 4 steps, the third after 2 more."""
    batch = batch_of([6, 3, 5], new=[20, 4, 6], free=64, page=page)
    allocator, table = batch.token_to_kv_pool_allocator, batch.req_to_token_pool.req_to_token
    now = reserve(batch, 4, left=1)
    known, free = [req.kv_allocated_len for req in batch.reqs], allocator.available_size()
    ahead = reserve_ahead(batch, now, 4)
    assert ahead is not None
    assert (ahead.lengths.tolist(), ahead.ends.tolist(), ahead.left) == ([10, 7, 9], [13, 6, 10], 1)
    np.testing.assert_array_equal(ahead.slots, [table[0, 9:13], [-1] * 4, [*table[2, 8:10], -1, -1]])
    assert [req.kv_allocated_len for req in batch.reqs] == known  # the library is not told
    assert free - allocator.available_size() == {1: 6, 4: 8}[page]  # 4 and 2 tokens, or the last page of two rows
    taken = [slot for part in (now, ahead) for slot in part.slots[part.slots >= 0].tolist()]
    assert len(set(taken)) == len(taken)

    keep(batch, now, np.array([4, 4, 2]))  # the third has stopped after 6 tokens
    give_back(batch, ahead.of(np.array([False, True, True])))
    assert allocator.available_size() == free - {1: 6 - 2 - 2, 4: 8 - 4}[page]  # of both launches; page 2 stays its own
    give_back(batch, ahead.of(np.array([True, False, False])))
    assert allocator.available_size() == free + {1: 2, 4: 0}[page]
    again = allocator.alloc(allocator.available_size()).tolist()
    assert len(set(again)) == len(again)  # nothing was given back twice


@pytest.mark.parametrize(("new", "free", "given"), [(4, 64, 4), (20, 64, 3), (20, 14, 4)])
def test_nothing_is_reserved_ahead_without_use_or_room(new: int, free: int, given: int) -> None:
    """All rows end with this launch; it has fewer steps than others; or 8 more slots leave none for each row."""
    batch = batch_of([6, 3], new=[new, new], free=free, page=1)
    now = reserve(batch, given, left=0)
    assert now.steps == given
    assert reserve_ahead(batch, now, 4) is None


@pytest.mark.parametrize(
    ("page", "free", "steps"),
    [
        (1, 0, 1),
        (1, 1, 1),  # a second step needs two
        (1, 2, 2),
        (1, 5, 3),
        (1, 64, 9),
        (4, 4, 1),  # the library evicts when fewer pages are free than rows
        (4, 8, 4),  # at the 4th step the first row has 9 tokens and takes one of the two pages
        (4, 12, 5),  # at the 5th the second row does
        (4, 16, 8),  # at the 8th the first row takes the third of four
    ],
)
def test_a_launch_ends_before_the_library_would_evict(page: int, free: int, steps: int) -> None:
    """Rows of 6 and 5 tokens, with 9 to come."""
    batch = batch_of([6, 5], new=[9, 9], free=free, page=page)
    assert reserve(batch, 16, left=0).steps == steps
