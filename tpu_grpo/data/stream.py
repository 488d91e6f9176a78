"""A PromptStream is an endless stream of prompt batches whose position is the step.

Three prompts a, b, c, two per step (P = 2): the stream goes through one shuffled epoch after another, and step ``s``
(counted from 1) holds its positions ``2s - 2`` and ``2s - 1``, so a batch may straddle two epochs:

    epoch 0: c a b   epoch 1: a b c   ...
    step 1: c a      step 2: b a      step 3: b c

A mixture takes its sources in turn, so that of any first n positions each has its share, to less than one prompt;
each source goes through epochs of its own. With weights 2 and 1 for the sources x and y:  x y x x y x x y x ...

What stands at a position depends on the data, the settings and the seed only: every host gets the same prompts. So does
``batch(step)``, as long as steps are all of P prompts; which positions they take otherwise, see drawing.py.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from tpu_grpo.data.order import shuffled, sorted_by
from tpu_grpo.data.rendered import RenderedPrompts
from tpu_grpo.records.errors import DataError
from tpu_grpo.records.stages import Prompt, PromptBatch


@dataclass(frozen=True)
class Part:
    """A Part holds the prompts of one source, and its weight beside the others."""

    name: str
    rendered: RenderedPrompts
    weight: float = 1.0


class PromptStream:
    """A PromptStream gives batches of P prompts, for any step, from rendered prompts of one source or of several.

    Args:
        parts: the sources.
        prompts_per_step: P.
        seed: decides the shuffles.
        shuffle: whether an epoch is shuffled.
        curriculum: a column that every epoch of every source is sorted by.

    Raises:
        DataError: for a source without a prompt, or a curriculum's values that cannot be sorted.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        prompts_per_step: int,
        seed: int,
        shuffle: bool,
        curriculum: str | None = None,
    ):
        import grain  # imports jax, which checking and showing a config do without

        for part in parts:
            if not part.rendered.prompts:
                raise DataError(f"a stream needs at least one prompt, got none from {part.name}; add records to it")
        self.parts = tuple(parts)
        self._prompts_per_step = prompts_per_step
        self._settings = [prompts_per_step, seed, shuffle, curriculum]
        self._ends = list(accumulate(len(part.rendered.prompts) for part in parts))
        orders = [
            _order(part.rendered, own_seed, shuffle, curriculum).map(lambda index, start=start: start + index)
            for part, start, own_seed in zip(parts, [0, *self._ends], _seeds(seed, len(parts)), strict=False)
        ]
        self._order = orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, [part.weight for part in parts])

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the records, which the rewards get."""
        return tuple(self._first.columns)

    @property
    def size(self) -> int:
        """Count the prompts of all sources, which an epoch goes through."""
        return self._ends[-1]

    @property
    def dropped(self) -> int:
        """Count the records left out because their prompt is longer than data.max_prompt_tokens."""
        return sum(part.rendered.dropped for part in self.parts)

    @property
    def notes(self) -> list[str]:
        """Say what a run should say of its prompts at its start."""
        return [f"{self.dropped} prompts were dropped: longer than data.max_prompt_tokens"] if self.dropped else []

    @cached_property
    def digest(self) -> str:
        """Return the sha256, in hex, of all that decides which prompts come at which step, the prompts included."""
        return self._digest([part.rendered.digest for part in self.parts])

    def digest_of_tokens(self) -> str:
        """Return the digest that runs kept of their prompts before it was one of texts; this makes all tokens."""
        return self._digest([prompts_digest(part.rendered.prompts) for part in self.parts])

    def _digest(self, parts: Sequence[str]) -> str:
        digest = hashlib.sha256(json.dumps(self._settings).encode())
        for part, of_part in zip(self.parts, parts, strict=True):
            digest.update(f"{part.name} {part.weight!r} {len(part.rendered.prompts)}\n".encode())
            digest.update(of_part.encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return the digest, and for every source its prompts, weight and how many were dropped as too long."""
        sources = [
            {"name": p.name, "weight": p.weight, "prompts": len(p.rendered.prompts), "dropped": p.rendered.dropped}
            for p in self.parts
        ]
        return {"digest": self.digest, "digest_of": "texts", "sources": sources}

    def batch(self, step: int) -> PromptBatch:
        """Return the P prompts of a step, counted from 1, of a run whose steps are all of P prompts.

        Raises:
            DataError: for a step below 1.
        """
        if step < 1:
            raise DataError(f"a step must be >= 1, got {step}; steps count from 1")
        start = (step - 1) * self._prompts_per_step
        return self.at(step, range(start, start + self._prompts_per_step))

    def at(self, step: int, positions: Sequence[int], number: int = 0) -> PromptBatch:
        """Return the prompts at some positions, for a step and the ``number`` of its round."""
        records = tuple(self.record(position) for position in positions)
        return PromptBatch(step, tuple(map(self.prompt, records)), records, tuple(positions), number)

    def record(self, position: int) -> int:
        """Return the number of the prompt at a position, from 0."""
        found = self._order[position]
        assert found is not None  # only grain's filters leave holes
        return int(found)

    @cached_property
    def _first(self) -> Prompt:
        return self.parts[0].rendered.prompts[0]

    def prompt(self, record: int) -> Prompt:
        """Return a prompt by its number among those of all sources, which are counted from 0, source after source."""
        part = bisect_right(self._ends, record)
        return self.parts[part].rendered.prompts[record - (self._ends[part - 1] if part else 0)]


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return the sha256, in hex, of the tokens and columns of prompts in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(
            json.dumps([prompt.token_ids, dict(prompt.columns)], default=str).encode("utf-8", "backslashreplace")
        )
    return digest.hexdigest()


def _order(rendered: RenderedPrompts, seed: int, shuffle: bool, curriculum: str | None):
    if curriculum is None:
        return shuffled(len(rendered.prompts), seed, shuffle)
    return sorted_by(rendered.column(curriculum), curriculum, seed, shuffle)


def _seeds(seed: int, count: int) -> list[int]:
    """Return the run's seed for one source; each of several gets a seed of its own."""
    if count == 1:
        return [seed]
    return [int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) for index in range(count)]
