"""The cache pages of layers with a sliding window, which keep only the last tokens of each row.

The scheduler gives out cache slots as if every layer kept all tokens, and layers without a window store each token in
its slot. Layers with a window have a smaller pool. `WindowPages` maps pages of the scheduler's slots to pages of this
pool when a launch is about to fill them, and takes a page of the pool back

- when it lies before the window of the row that owns it, and
- if a launch needs more pages than are free: pages that the scheduler has freed, then those of cached prefixes, the
  least recently used first.

The pool is large enough for the windows of all running rows, so the scheduler's decisions stay the same. A cached
prefix may have lost its windows: then a request continues it from the last place that has a whole window before it, and
computes the rest again, after which the prefix has that window, too. `WindowPages.guard` sees to both.

Pages can be given to another row while launches that read them are queued, because devices run launches in order.

Suffixes: b rows, N pages of a row up to the context.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.radix_cache import RadixCache

from tpu_grpo.engine.options import MOST_STEPS, EngineOptions


class Rows(NamedTuple):
    """Rows of the scheduler's request table."""

    pages_bN: Int[np.ndarray, "b N"]
    """The pages of each row's slots."""
    first_b: Int[np.ndarray, " b"]
    """The position of each row's first token that may not be computed yet."""
    ends_b: Int[np.ndarray, " b"]
    """The tokens for which each row has slots."""


class WindowPages:
    """Maps pages of the scheduler's slots to pages of the pool of layers with a window; page 0 of both is nobody's."""

    def __init__(self, window: int, page_size: int, *, pages: int, window_pages: int, rows: int):
        """Start with nothing mapped.

        Args:
            window: a token sees this many tokens, itself included.
            page_size: tokens of a page.
            pages: the number of the scheduler's pages, without page 0.
            window_pages: the number of the pool's pages, without page 0.
            rows: how many rows' windows the pool holds, running or cached.
        """
        self.page_size, self.window_pages, self.rows = page_size, window_pages, rows
        self._before = -(-(window - 1) // page_size)  # pages of the window before the page of its last token
        self.page_of = np.zeros(pages + 1, np.int32)
        """The pool's page of each of the scheduler's pages; 0 if it has none."""
        self._used = np.zeros(pages + 1, np.int64)
        self.live: Callable[[], Rows]
        """Returns all rows that hold slots; the scheduler sets it, and ``unowned``."""
        self.unowned: Callable[[], Int[np.ndarray, " pages"]]
        """Returns the scheduler's free pages."""
        self.clear()

    @classmethod
    def of(cls, windows: Iterable[int | None], options: EngineOptions) -> "WindowPages | None":
        """Make the map for layers with these windows; None if no layer has one, or if a pool would save no memory.

        A running row needs its window and the tokens of two launches, a prefill its tokens. The windows of
        ``options.prefixes`` cached prefixes have room besides.
        """
        window, page = max((each for each in windows if each is not None), default=None), options.page_size
        if window is None:
            return None
        steps, running = options.steps_per_launch or MOST_STEPS, options.max_running_requests
        rows = running + (running if options.prefixes is None else options.prefixes)
        of_row = -(-(window - 1) // page) + -(-2 * steps // page) + 2
        pages, needed = options.cache_tokens // page, rows * of_row + -(-options.shapes.prefill[-1] // page)
        return cls(window, page, pages=pages, window_pages=needed, rows=rows) if needed < pages else None

    def clear(self) -> None:
        """Forget all pages; no row may be running."""
        self.page_of[:] = 0
        self._free = np.arange(1, self.window_pages + 1, dtype=np.int32)
        self._launches = 0

    def take(self, rows: Rows, own_b: Int[np.ndarray, " b"]) -> Int[np.ndarray, "b N"]:
        """Return the pool's pages for a launch of these rows; 0 for pages that no token of the launch sees.

        Pages before the rows' windows are taken back from the tokens that the rows own, those from ``own_b`` on.
        """
        pages_bN, (begins_b1, needed_bN) = rows.pages_bN, self._needed(rows)
        column_N = np.arange(pages_bN.shape[1])
        self._release(pages_bN[(column_N >= -(-own_b // self.page_size)[:, None]) & (column_N < begins_b1)])
        needed, computed_bN = pages_bN[needed_bN], column_N * self.page_size < rows.first_b[:, None]
        assert self.page_of[pages_bN[needed_bN & computed_bN]].all(), "a row has lost its window"
        self._launches += 1
        self._used[needed] = 2 * self._launches
        last_bN = needed_bN & (column_N >= (rows.ends_b // self.page_size)[:, None] - self._before - 1)
        self._used[pages_bN[last_bN]] += 1  # of a prompt, the end is most likely to be continued
        new = needed[self.page_of[needed] == 0]
        if (short := len(new) - len(self._free)) > 0:
            self._reclaim(short, needed)
        self.page_of[new], self._free = np.split(self._free, [len(new)])
        return np.where(needed_bN, self.page_of[pages_bN], 0)

    def guard(self, tree: RadixCache) -> None:
        """Let the prefix tree find only what has a whole window before its end, and give it the windows of requests.

        The tree keeps its own slots for tokens that it has already. The request's window moves to these slots, if they
        have none.
        """
        match, insert, page = tree.match_prefix, tree.insert, self.page_size

        def match_prefix(params: MatchPrefixParams) -> Any:
            found = match(params)
            pages = found.device_indices[::page] // page
            if (usable := self._usable(self.page_of[pages] > 0)) < len(pages):
                found = match(replace(params, key=params.key[: usable * page]))
            return found

        def insert_request(params: InsertParams) -> int:
            known, key, value = insert(params), params.key, params.value
            if known and key is not None and value is not None:
                slots = match(MatchPrefixParams(key=key[:known])).device_indices
                kept, given = slots[::page] // page, value[:known:page] // page
                moves = (self.page_of[kept] == 0) & (self.page_of[given] > 0)
                kept, given = kept[moves], given[moves]
                self.page_of[kept], self._used[kept] = self.page_of[given], self._used[given]
                self.page_of[given] = 0
            return known

        tree.match_prefix, tree.insert = match_prefix, insert_request

    def _needed(self, rows: Rows) -> tuple[Int[np.ndarray, "b 1"], Bool[np.ndarray, "b N"]]:
        """Return each row's first page that its next tokens see, and which pages they see or fill.

        The window is that of the first token of a page: if the row ends there, a request may continue from the page.
        """
        begins_b1 = (rows.first_b // self.page_size - self._before)[:, None]
        column_N = np.arange(rows.pages_bN.shape[1])
        return begins_b1, (column_N >= begins_b1) & (column_N * self.page_size < rows.ends_b[:, None])

    def _usable(self, mapped_n: Bool[np.ndarray, " n"]) -> int:
        """Return the most pages of a prefix, of which these are mapped, that have a whole window before their end."""
        places = np.arange(len(mapped_n))
        last_gap = np.maximum.accumulate(np.where(mapped_n, -1, places))
        whole = places - last_gap >= np.minimum(places + 1, self._before)
        return int(np.max(np.nonzero(whole)[0] + 1, initial=0))

    def _reclaim(self, count: int, needed: Int[np.ndarray, " needed"]) -> None:
        """Take back at least ``count`` pages that are neither ``needed`` now nor in the window of any row."""
        kept, freed = np.zeros(len(self.page_of), np.bool_), np.zeros(len(self.page_of), np.bool_)
        rows = self.live()
        kept[rows.pages_bN[self._needed(rows)[1]]] = kept[needed] = True
        freed[self.unowned()] = True
        found = np.flatnonzero((self.page_of > 0) & ~kept)
        assert len(found) >= count, f"{count} pages must be free, {len(found)} can be"
        order = np.lexsort((self._used[found], ~freed[found]))
        self._release(found[order[: max(count, int(freed[found].sum()))]])

    def _release(self, pages: Int[np.ndarray, " pages"]) -> None:
        self._free = np.concatenate([self._free, self.page_of[pages][self.page_of[pages] > 0]])
        self.page_of[pages] = 0
