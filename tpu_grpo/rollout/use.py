"""What sampling cost: launches, steps, rows that were occupied, and the seconds of the host."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from jax.profiler import TraceAnnotation
from jaxtyping import Int


@dataclass
class EngineUse:
    """What an engine has done so far, and the host's seconds by what it did."""

    schedule: float = 0.0
    """Choosing the next batch and reserving its cache slots."""
    launch: float = 0.0
    """Building inputs and calling compiled programs."""
    wait: float = 0.0
    """Waiting for the devices."""
    collect: float = 0.0
    """Appending sampled tokens to their requests."""
    prefills: int = 0
    """Launches of a prefill step."""
    accepted: int = 0
    """Rows whose prompts they completed, so that decode steps go on with them."""
    launches: int = 0
    """Launches of decode steps."""
    steps: int = 0
    """Decode steps of all launches."""
    tokens: int = 0
    """Tokens that decode steps sampled."""
    places: int = 0
    """Tokens that they would have sampled with as many rows as run at once."""

    @contextmanager
    def time(self, what: Literal["schedule", "launch", "wait", "collect"]) -> Iterator[None]:
        """Add the seconds of the block to this field, which also names the block in a timeline."""
        start = time.perf_counter()
        with TraceAnnotation(what):
            yield
        setattr(self, what, getattr(self, what) + time.perf_counter() - start)

    def count_launch(self, counts_b: Int[np.ndarray, " b"], places: int) -> None:
        """Add a launch of decode steps that sampled so many tokens of each row, with ``places`` rows at once."""
        steps = int(counts_b.max())
        self.launches += 1
        self.steps += steps
        self.tokens += int(counts_b.sum())
        self.places += steps * places

    def __sub__(self, before: "EngineUse") -> "EngineUse":
        return EngineUse(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    @property
    def figures(self) -> dict[str, float]:
        """The metrics of a rollout; shares of decode steps only if there were any."""
        values = {"rollout/wait_seconds": self.wait}
        if self.prefills:
            values["rollout/prefills"] = self.prefills
            values["rollout/accepted_rows"] = self.accepted / self.prefills
        if self.launches:
            values["rollout/tokens_per_launch"] = self.tokens / self.launches
            values["rollout/occupied_rows"] = self.tokens / self.places
        return values


def total_use(uses: Iterable[EngineUse]) -> EngineUse:
    """Add up what several engines have done."""
    total = EngineUse()
    for use in uses:
        for field in fields(use):
            setattr(total, field.name, getattr(total, field.name) + getattr(use, field.name))
    return total
